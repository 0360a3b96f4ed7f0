"""Counts calls of Python functions of Weft: they are exact, where times are not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


class CallCounter:
    """Counts calls of functions of Weft, `weft.testing` aside, on the thread that calls `start` and `stop`.

    Inner functions of comprehensions are counted once, coroutines and generators every time they go on.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: object = None

    def start(self) -> None:
        """Begin to count, without the garbage collector: finalizers of other tests' objects do not belong here."""
        self._before = sys.getprofile()
        gc.collect()
        gc.disable()
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Stop counting."""
        sys.setprofile(self._before)  # type: ignore[arg-type]
        gc.enable()

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        self.count += event == "call" and module.startswith("weft.") and not module.startswith("weft.testing")


def count_calls(action: Callable[[], object]) -> int:
    """Calls of functions of Weft while `action` runs."""
    counter = CallCounter()
    counter.start()
    try:
        action()
    finally:
        counter.stop()
    return counter.count
