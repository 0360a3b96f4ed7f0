"""Sends requests to a server at the times of a schedule, even if it falls behind, and returns an outcome for each.

The caller's `send` does the HTTP. Latency counts from the time at which a request is *due*, not from when it is sent,
so that a server that falls behind increases the latencies and does not slow down the arrivals (Tene's "coordinated
omission").
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from weft.cli.bench.clock import LoadClock, MachineClock
from weft.cli.bench.measure import Outcome
from weft.cli.bench.workload import BenchRequest

Send = Callable[[BenchRequest, float], Awaitable[Outcome]]
"""Sends a request that is due at this time of the clock. Does not raise."""
Request = TypeVar("Request")
Answer = TypeVar("Answer")


async def offer(
    requests: Sequence[Request],
    schedule: Iterable[float],
    send: Callable[[Request, float], Awaitable[Answer]],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Answer], None] = lambda outcome: None,
    clock: LoadClock | None = None,
) -> tuple[list[Answer], float]:
    """Send each request at its time in `schedule`; returns outcomes in the order of `requests`, and the elapsed
    seconds.

    With `max_concurrency`, due requests wait here in order for a running one to end, and the wait is part of their
    latency. Use `closed_loop` for a load without a schedule.
    """
    clock = clock or MachineClock()
    slots = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    began = clock.now()

    async def one(request: Request, due: float) -> Answer:
        async with slots:
            outcome = await send(request, due)
        on_done(outcome)
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for request, at in zip(requests, schedule, strict=True):
            await clock.until(began + at)
            tasks.append(group.create_task(one(request, began + at)))
    return [task.result() for task in tasks], clock.now() - began


async def closed_loop(
    requests: Sequence[BenchRequest],
    send: Send,
    *,
    concurrency: int,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    clock: LoadClock | None = None,
) -> tuple[list[Outcome], float]:
    """Keep `concurrency` requests in progress until all are done. A request is due when an earlier one ends.

    A slow server is offered less load, so this measures capacity, not latency.
    """
    clock = clock or MachineClock()
    began = clock.now()
    outcomes: dict[int, Outcome] = {}
    waiting = iter(enumerate(requests))

    async def one_after_the_other() -> None:
        for index, request in waiting:
            outcomes[index] = await send(request, clock.now())
            on_done(outcomes[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())
    return [outcomes[index] for index in range(len(requests))], clock.now() - began


def is_closed(rate: float, max_concurrency: int | None) -> bool:
    """Whether a load is limited only by its concurrency, without a schedule."""
    return math.isinf(rate) and max_concurrency is not None
