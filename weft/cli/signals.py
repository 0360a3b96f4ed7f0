"""Signals that end a command: what it has begun elsewhere ends with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP (a closed terminal) end it as Ctrl-C does. Only the first of them does: a
    second one must not interrupt what the block does at its end. Raises `SystemExit` with the status of the signal."""
    caught: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not caught:
            caught.append(number)
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    # A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if caught:
            raise SystemExit(128 + caught[0]) from None
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
