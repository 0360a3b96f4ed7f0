"""Time for what sends load: the machine's, or a test's."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from any origin."""

    def now(self) -> float:
        """The moment."""
        ...

    async def until(self, moment: float) -> None:
        """Return at this moment, at once where it has passed."""
        ...


class MachineClock:
    """`time.perf_counter`, which the times of measured events are of, too."""

    def now(self) -> float:
        """The moment."""
        return time.perf_counter()

    async def until(self, moment: float) -> None:
        """Sleep; what is due by now does not yield to other tasks."""
        if (left := moment - time.perf_counter()) > 0:
            await asyncio.sleep(left)


class LoopWatch:
    """How late this event loop wakes, and how busy its process is: whether a client's own figures can be believed.

    A context manager. Inside, a task wakes every `PERIOD_S` and notes how much later than that it is.
    """

    PERIOD_S = 0.01

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.busy_share = 0.0
        """Processor time of this process by time that passed; 1 is a whole core."""

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
