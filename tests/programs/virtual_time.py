"""An event loop whose clock jumps to the next timer instead of waiting for it, for tests of what takes minutes."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Does not wait: what the loop would have waited is added to its time."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)  # for a thread
        ready = super().select(0)
        if not ready:
            self.now_s += max(0.0, timeout)
        return ready


def _loop() -> asyncio.AbstractEventLoop:
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s
    return loop


class LoopClock:
    """The loop's time as a `Clock`."""

    def now(self) -> float:
        return asyncio.get_event_loop().time()


def run_virtually(test: Coroutine[Any, Any, None]) -> None:
    """Like `asyncio.run`, in no time."""
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(test)
