"""`Watchdog`: distinguishes a hung child from a busy one. Pure: times and counters are arguments."""

from __future__ import annotations

from typing import NamedTuple

BUSY_FACTOR = 10
"""Factor on the deadline of a child that uses the processor without progress, such as a long compilation."""
BUSY_SHARE = 0.01
"""CPU seconds per second above which a child without progress counts as busy."""
MAX_GAP_S = 2.0
"""Longest time between two looks that counts as time without progress. A parent that stands still for longer does not
ping the child, and an idle child makes progress only when it is pinged."""


class Signs(NamedTuple):
    """The state of a child at one moment, as its parent observes it."""

    now_s: float
    progress: int
    """The child's `ProgressCounter`."""
    cpu_s: float
    """CPU seconds that the child has used."""


class Watchdog:
    """Watches one child. A child whose counter advances is alive.

    Without progress it counts as hung after `deadline_s` seconds, or `BUSY_FACTOR` times as many if it uses the
    processor meanwhile, which ends endless loops. Of the time between two looks at most `MAX_GAP_S` counts.
    """

    def __init__(self, deadline_s: float, first: Signs):
        self._deadline_s = deadline_s
        self._progress = first
        """The signs at the last progress."""
        self._seen_s = first.now_s
        """Time of the last look."""
        self._quiet_s = 0.0

    def look(self, signs: Signs) -> str | None:
        """Why the child must be killed, as the end of a sentence; None if it must not."""
        gap_s, self._seen_s = signs.now_s - self._seen_s, signs.now_s
        if signs.progress != self._progress.progress:
            self._progress, self._quiet_s = signs, 0.0
            return None
        self._quiet_s += min(gap_s, MAX_GAP_S)
        is_busy = signs.cpu_s - self._progress.cpu_s >= BUSY_SHARE * self._quiet_s
        if self._quiet_s <= self._deadline_s * (BUSY_FACTOR if is_busy else 1):
            return None
        how = "computed without progress" if is_busy else "did not answer"
        return f"{how} for {self._quiet_s:.0f} s and was killed"
