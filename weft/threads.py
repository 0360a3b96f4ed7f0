"""Threads that tenants share fairly: a tenant that asks for much delays its own work alone.

Owns which job runs next. The tenant that has been served least goes first, by processor time; a tenant's own jobs begin
in their order, and no more than `per_tenant` of them run at once, so that a thread is free for the others. The
processor time of a job is reported to its submitter, which may charge a program for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
J = TypeVar("J")

MIN_COST_S = 1e-5
"""What a job counts as at least, so that jobs without a measurable cost take turns too."""

Charge = Callable[[float], object]
"""Told the seconds of processor time that a job took."""


class FairQueue(Generic[J]):
    """Jobs of tenants, in the order in which they are to run. Knows no threads and no clock.

    A tenant's account of what it was served is kept while it has jobs that wait or run. One that comes (back) starts
    level with the least served of the others: it neither has to catch up nor has saved anything.
    """

    def __init__(self, per_tenant: int):
        self._per_tenant = per_tenant
        self._waiting: dict[str, deque[J]] = {}
        self._running: Counter[str] = Counter()
        self._served_s: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, job: J) -> None:
        """Add a job, behind those of its tenant."""
        if tenant not in self._served_s:
            self._served_s[tenant] = min(self._served_s.values(), default=0.0)
        self._waiting.setdefault(tenant, deque()).append(job)

    def take(self) -> tuple[str, J] | None:
        """The job that runs next, with its tenant; None where none may run now. `done` follows every one."""
        may = [tenant for tenant in self._waiting if self._running[tenant] < self._per_tenant]
        if not may:
            return None
        tenant = min(may, key=self._served_s.__getitem__)
        jobs = self._waiting[tenant]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[tenant]
        self._running[tenant] += 1
        return tenant, job

    def done(self, tenant: str, cost_s: float) -> None:
        """A job that was taken is over; what it took."""
        self._served_s[tenant] += max(cost_s, MIN_COST_S)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            if tenant not in self._waiting:
                del self._served_s[tenant]

    def clear(self) -> list[J]:
        """Forget the jobs that wait; which those were."""
        dropped = [job for jobs in self._waiting.values() for job in jobs]
        self._waiting.clear()
        self._served_s = {tenant: self._served_s[tenant] for tenant in self._running}
        return dropped


class _Job(NamedTuple):
    work: Callable[[], Any]
    future: Future[Any]
    charge: Charge | None


class FairThreads:
    """`num_threads` threads, of which one tenant has `per_tenant` at most. May be used from any thread and loop."""

    def __init__(self, num_threads: int, *, per_tenant: int, name: str):
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job] = FairQueue(per_tenant)

    async def run(self, work: Callable[[], T], *, tenant: str = "", charge: Charge | None = None) -> T:
        """What `work` returns, or raises. `charge` is told, on this loop, what it took, also where the caller was
        cancelled meanwhile: the work then ends unheard, or does not begin."""
        loop = asyncio.get_running_loop()

        def charge_later(seconds: float) -> None:
            if charge is not None and not loop.is_closed():
                loop.call_soon_threadsafe(charge, seconds)

        return await asyncio.wrap_future(self.submit(work, tenant=tenant, charge=charge_later))

    def submit(self, work: Callable[[], T], *, tenant: str = "", charge: Charge | None = None) -> Future[T]:
        """The future of `work`. `charge` is called on the thread that did it. Raises `RuntimeError` once closed."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(tenant, _Job(work, future, charge))
        try:
            self._threads.submit(self._drain)
        except RuntimeError:
            # Closed: waiting work is not started any more.
            self.close()
            raise
        return future

    def close(self) -> None:
        """Begin nothing any more; what runs ends in its own time. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            dropped = self._queue.clear()
        for job in dropped:
            job.future.cancel()

    def _drain(self) -> None:
        """On a thread: jobs, until none may run. One that its tenant's share keeps waiting is begun by the thread that
        ends another job of that tenant."""
        while True:
            with self._lock:
                taken = self._queue.take()
            if taken is None:
                return
            tenant, job = taken
            cost_s = 0.0
            try:
                cost_s = _carry_out(job)
            finally:
                with self._lock:
                    self._queue.done(tenant, cost_s)


def _carry_out(job: _Job) -> float:
    """Processor time that it took."""
    if not job.future.set_running_or_notify_cancel():
        return 0.0
    began_s = time.thread_time()
    outcome, error = None, None
    try:
        outcome = job.work()
    except BaseException as raised:  # passed on to the task that awaits the future
        error = raised
    cost_s = time.thread_time() - began_s
    # Charge first: a task that learns of the end must find the time charged.
    if job.charge is not None:
        job.charge(cost_s)
    if error is not None:
        job.future.set_exception(error)
    else:
        job.future.set_result(outcome)
    return cost_s
