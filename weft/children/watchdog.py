"""`Watchdog`: distinguishes a hung child from a busy one. Pure: times and counters are arguments."""

from __future__ import annotations

from typing import NamedTuple

BUSY_FACTOR = 10
"""Factor on the deadline of a child that uses the processor without progress, such as a long compilation."""
BUSY_SHARE = 0.01
"""CPU seconds per second above which a child without progress counts as busy."""


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
    processor meanwhile, which ends endless loops.
    """

    def __init__(self, deadline_s: float, first: Signs):
        self._deadline_s = deadline_s
        self._last = first

    def look(self, signs: Signs) -> str | None:
        """Why the child must be killed, as the end of a sentence; None if it must not."""
        if signs.progress != self._last.progress:
            self._last = signs
            return None
        quiet_s = signs.now_s - self._last.now_s
        is_busy = signs.cpu_s - self._last.cpu_s >= BUSY_SHARE * quiet_s
        if quiet_s <= self._deadline_s * (BUSY_FACTOR if is_busy else 1):
            return None
        how = "computed without progress" if is_busy else "did not answer"
        return f"{how} for {quiet_s:.0f} s and was killed"
