"""`Watchdog`: tells a child that is stuck from one that is busy. Pure: times and counters are arguments."""

from __future__ import annotations

from typing import NamedTuple

BUSY_FACTOR = 10
"""How many times longer a child without progress may take while it uses the processor: a long compilation, say."""
BUSY_SHARE = 0.01
"""Processor seconds per second from which a child without progress counts as busy."""


class Signs(NamedTuple):
    """What a parent sees of a child at one moment."""

    now_s: float
    progress: int
    """The child's `ProgressCounter`."""
    cpu_s: float
    """Processor time that the child has used."""


class Watchdog:
    """Watches one child. A child whose counter moves lives, however late it answers.

    Without progress it is stuck after `deadline_s` seconds, and after `BUSY_FACTOR` times as many where it uses the
    processor meanwhile; an endless loop ends there.
    """

    def __init__(self, deadline_s: float, first: Signs):
        self._deadline_s = deadline_s
        self._last = first

    def look(self, signs: Signs) -> str | None:
        """Why the child has to be killed, as the end of a sentence; None while it need not be."""
        if signs.progress != self._last.progress:
            self._last = signs
            return None
        quiet_s = signs.now_s - self._last.now_s
        is_busy = signs.cpu_s - self._last.cpu_s >= BUSY_SHARE * quiet_s
        if quiet_s <= self._deadline_s * (BUSY_FACTOR if is_busy else 1):
            return None
        how = "computed without progress" if is_busy else "did not answer"
        return f"{how} for {quiet_s:.0f} s and was killed"
