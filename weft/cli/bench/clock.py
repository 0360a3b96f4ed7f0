"""The clock of the load generator, real or fake, and a monitor of the event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class LoadClock(Protocol):
    """A clock that can be waited on. Its seconds count from any origin."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...

    async def until(self, moment: float) -> None:
        """Return at this time, or at once if it has passed."""
        ...


class MachineClock:
    """`time.perf_counter`, which is also the clock of measured events."""

    def now(self) -> float:
        """Return the current time in seconds."""
        return time.perf_counter()

    async def until(self, moment: float) -> None:
        """Sleep until this time; if it has passed, return without yielding to other tasks."""
        if (left := moment - time.perf_counter()) > 0:
            await asyncio.sleep(left)


class LoopWatch:
    """Measures the delay of this event loop and the load of its process, which limit the accuracy of the figures.

    A context manager. Inside, a task wakes every `PERIOD_S` and records its delay.
    """

    PERIOD_S = 0.01

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.busy_share = 0.0
        """CPU time of this process divided by elapsed time; 1 is a whole core."""

    async def __aenter__(self) -> LoopWatch:
        self._began, self._used = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.busy_share = (time.process_time() - self._used) / (time.perf_counter() - self._began)

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self.lags_s.append(max(0.0, time.perf_counter() - due))
