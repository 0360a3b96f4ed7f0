"""`RunClock`: the timers of a run. One ends the run when its limit of seconds is reached; one stores its used time.

Owns when these happen. What follows from them is decided by `RunState` and its `Driver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.workflow.run.journal import RunJournal
from weft.workflow.run.state import RunState

KEPT_EVERY_S = 1.0
"""Of the used time, the most that a kill of the process loses."""


class RunClock:
    """Used from the event loop of the run, whose time it takes."""

    def __init__(self, state: RunState, journal: RunJournal | None, on_time_over: Callable[[], None]):
        """`on_time_over` is called once, in `start` where earlier executions have used all the time."""
        self._state = state
        self._journal = journal
        self._on_time_over = on_time_over
        self._end: asyncio.TimerHandle | None = None
        self._next_keep: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The run begins, or goes on."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        ends_at = self._state.begin(now)
        if self._journal is not None:
            self._next_keep = loop.call_later(KEPT_EVERY_S, self._keep_and_go_on)
        if ends_at is not None and ends_at <= now:
            self._on_time_over()
        elif ends_at is not None:
            self._end = loop.call_at(ends_at, self._on_time_over)

    def stop(self) -> None:
        """The run is no longer in progress. Stores the used time."""
        for timer in (self._end, self._next_keep):
            if timer is not None:
                timer.cancel()
        self._keep()

    def _keep_and_go_on(self) -> None:
        self._keep()
        self._next_keep = asyncio.get_running_loop().call_later(KEPT_EVERY_S, self._keep_and_go_on)

    def _keep(self) -> None:
        if self._journal is not None:
            self._journal.keep_seconds(self._state.seconds(asyncio.get_running_loop().time()))
