"""Time as an argument. Pure layers receive `now` in seconds; only owners of a loop hold a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never decreases."""
        ...


class SystemClock:
    """A clock that reads the machine's monotonic time."""

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        """The time last set, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
