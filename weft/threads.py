"""Thread pools that tenants share fairly: a tenant with much work delays only its own jobs.

Owns the order of jobs. The tenant with the least CPU time served goes first. A tenant's jobs start in order, and at
most `per_tenant` of them run at once, so that threads remain for other tenants. The CPU time of a job is reported to
its submitter, which may charge a program for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from weft.abi.errors import Overloaded

T = TypeVar("T")
J = TypeVar("J")

MIN_COST_S = 1e-5
"""Minimum cost of a job, so that jobs without a measurable cost alternate too."""

Charge = Callable[[float], object]
"""Called with the CPU seconds of a job."""
_STACK_SIZE = threading.Lock()
"""Held while the stack size of new threads, which is one for the process, is changed."""


class FairQueue(Generic[J]):
    """Queue of jobs by tenant, in fair order. Has no threads and no clock.

    A tenant's account is kept while it has waiting or running jobs. A tenant that arrives (again) starts level with the
    least served of the others, without credit or debt.
    """

    def __init__(self, per_tenant: int):
        self._per_tenant = per_tenant
        self._waiting: dict[str, deque[J]] = {}
        self._running: Counter[str] = Counter()
        self._served_s: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, job: J) -> None:
        """Append a job to those of its tenant."""
        if tenant not in self._served_s:
            self._served_s[tenant] = min(self._served_s.values(), default=0.0)
        self._waiting.setdefault(tenant, deque()).append(job)

    def take(self) -> tuple[str, J] | None:
        """Remove and return the next job with its tenant; None if no job may run now. Call `done` after each job."""
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
        """Record the end of a job and its CPU time."""
        self._served_s[tenant] += max(cost_s, MIN_COST_S)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            if tenant not in self._waiting:
                del self._served_s[tenant]

    def clear(self) -> list[J]:
        """Remove and return the waiting jobs."""
        dropped = [job for jobs in self._waiting.values() for job in jobs]
        self._waiting.clear()
        self._served_s = {tenant: self._served_s[tenant] for tenant in self._running}
        return dropped


class _Job(NamedTuple):
    work: Callable[[], Any]
    future: Future[Any]
    charge: Charge | None


class FairThreads:
    """A pool of `num_threads` threads, at most `per_tenant` of them for one tenant. Usable from any thread and event
    loop."""

    def __init__(self, num_threads: int, *, per_tenant: int, name: str, stack_bytes: int | None = None):
        """`stack_bytes` is the stack size of each thread, None: the process's default. Memory is taken as far as jobs
        use the stack, and kept until the pool is closed."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._stack_bytes = stack_bytes
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job] = FairQueue(per_tenant)
        self._drains: set[Future[Any]] = set()
        """Calls of `_drain` that will look at the queue again, each by the future of the job that it was started for.
        Guarded by `_lock`, as the queue and the following."""
        self._closed = False

    async def run(self, work: Callable[[], T], *, tenant: str = "", charge: Charge | None = None) -> T:
        """Run `work` on a thread and return its result. `charge` is called on this event loop with its CPU seconds,
        also if the caller is cancelled meanwhile; a cancelled job that has not started does not start."""
        loop = asyncio.get_running_loop()

        def charge_later(seconds: float) -> None:
            if charge is not None and not loop.is_closed():
                loop.call_soon_threadsafe(charge, seconds)

        return await asyncio.wrap_future(self.submit(work, tenant=tenant, charge=charge_later))

    def submit(self, work: Callable[[], T], *, tenant: str = "", charge: Charge | None = None) -> Future[T]:
        """Submit `work` and return its future. `charge` is called on the pool's thread. Raises `RuntimeError` after
        `close`. The future raises `Overloaded` if the process cannot start a thread and none is there."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool of threads is closed; submit no further jobs to it")
            self._queue.put(tenant, _Job(work, future, charge))
            self._drains.add(future)
        try:
            self._start(future)
        except RuntimeError as error:
            self._not_started(future, error)
        return future

    def close(self) -> None:
        """Start no further jobs; running jobs finish. Idempotent."""
        with self._lock:
            self._closed = True
            dropped = self._queue.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for job in dropped:
            job.future.cancel()

    def _start(self, future: Future[Any]) -> None:
        """Have one more thread run jobs. The executor creates its threads here, on demand."""
        if self._stack_bytes is None:
            self._threads.submit(self._drain, future)
            return
        with _STACK_SIZE:
            before = threading.stack_size(self._stack_bytes)
            try:
                self._threads.submit(self._drain, future)
            finally:
                threading.stack_size(before)

    def _not_started(self, future: Future[Any], error: RuntimeError) -> None:
        """The thread for a job could not be started. Other threads that run jobs take this one too; if there are none,
        the jobs that wait fail, because no thread would take them."""
        with self._lock:
            self._drains.discard(future)
            failed = [] if self._drains else self._queue.clear()
        refused = Overloaded(f"the server cannot start a thread ({error}); try again, or raise its limit of threads")
        refused.__cause__ = error
        for job in failed:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(refused)

    def _drain(self, future: Future[Any]) -> None:
        """Body of a thread: run jobs until none may run. A job that waits for its tenant's share is started by the
        thread that ends another job of that tenant. `future` identifies this call in `_drains`."""
        while True:
            with self._lock:
                taken = self._queue.take()
                if taken is None:
                    # Under the same lock: a job that is put later must not count on this call.
                    self._drains.discard(future)
                    return
            tenant, job = taken
            cost_s = 0.0
            try:
                cost_s = _carry_out(job)
            finally:
                with self._lock:
                    self._queue.done(tenant, cost_s)


def _carry_out(job: _Job) -> float:
    """CPU seconds of the job."""
    if not job.future.set_running_or_notify_cancel():
        return 0.0
    began_s = time.thread_time()
    outcome, error = None, None
    try:
        outcome = job.work()
    except BaseException as raised:  # passed on to the task that awaits the future
        error = raised
    cost_s = time.thread_time() - began_s
    # Charge first, so that the task that awaits the future finds the time charged.
    if job.charge is not None:
        job.charge(cost_s)
    if error is not None:
        job.future.set_exception(error)
    else:
        job.future.set_result(outcome)
    return cost_s
