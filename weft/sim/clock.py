"""The virtual clock, and what is due on it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[float], None]
"""Called with the time at which it was due, in seconds."""


class VirtualClock:
    """`weft.core.clock.Clock`: seconds that pass only when the simulation moves on."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the simulation began."""
        return self._now_s

    def move_to(self, time_s: float) -> None:
        """Set the time. Raises `ValueError` for an earlier one."""
        if time_s < self._now_s:
            raise ValueError(f"time cannot go back from {self._now_s} s to {time_s} s")
        self._now_s = time_s


class Agenda:
    """Actions by the time at which they are due; those of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._added = 0

    def at(self, time_s: float, action: Action) -> None:
        """Add an action. Raises `ValueError` for a time that is not finite."""
        if not math.isfinite(time_s):
            raise ValueError(f"an action cannot be due at {time_s} s")
        self._added += 1
        heapq.heappush(self._heap, (time_s, self._added, action))

    @property
    def next_s(self) -> float:
        """When the first action is due; infinity: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def run_due(self, now_s: float) -> None:
        """Carry out everything that is due by now, and what that adds for now."""
        while self._heap and self._heap[0][0] <= now_s:
            time_s, _, action = heapq.heappop(self._heap)
            action(time_s)
