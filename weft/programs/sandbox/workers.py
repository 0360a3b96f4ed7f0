"""Processes that work on untrusted code: few at once, in turns by tenant.

`WorkerProcess` is one process: started, waited for, killed, its processor time measured. `WorkerPool` gives tenants
their turns. What a process does is its module's business (`check_worker`, `compile_worker`), and so are its limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from weft.abi.errors import Draining, Overloaded

T = TypeVar("T")
Charge = Callable[[float], None]
"""Told how many seconds of processor time were spent on a tenant's behalf."""
_PACKAGES = str(Path(__file__).resolve().parents[3])
_ERROR_BYTES = 16 << 10
NICENESS = 5
"""Of workers below the processes that serve."""


class WorkerEnded(NamedTuple):
    """How a worker's process ended. `status` is negative for a signal."""

    status: int
    output: str
    errors: str
    """The first of what it wrote."""

    @property
    def out_of_time(self) -> bool:
        """Whether its limit of processor time ended it."""
        return self.status == -signal.SIGXCPU


class WorkerKilled(Draining):
    """The worker was killed before it was done. Raised to callers that wait when its pool is closed."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and checks and compiles no programs")


class WorkerProcess:
    """Processes of one task, one after the other. `run` blocks a thread; `kill` may be called from any."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """Processor time of its processes that have ended."""
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._killed = False

    def run(
        self,
        module: str,
        args: list[str],
        content: bytes,
        *,
        bare: bool = False,
        environment: dict[str, str] | None = None,
    ) -> WorkerEnded:
        """Run a module of Weft with `content` on its standard input, until it ends. `bare`: it needs nothing beyond the
        standard library. Raises `WorkerKilled` and `OSError`."""
        command = [sys.executable, *(["-S"] if bare else []), "-m", module, *args]
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            given.write(content)
            given.seek(0)
            with self._lock:
                if self._killed:
                    raise WorkerKilled
                process = subprocess.Popen(  # noqa: S603
                    command,
                    stdin=given,
                    stdout=output,
                    stderr=errors,
                    close_fds=True,
                    cwd="/",
                    env={"PATH": os.defpath, "PYTHONPATH": _PACKAGES, **(environment or {})},
                )
                self._pid = process.pid
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            # It is left a zombie until nobody can kill another process by its number.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._pid = None
                _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s += used.ru_utime + used.ru_stime
            if self._killed:
                raise WorkerKilled
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read(_ERROR_BYTES).decode("utf-8", "replace"))
        return WorkerEnded(process.returncode, *texts)

    def kill(self) -> None:
        """End it now, and have it start nothing more."""
        with self._lock:
            self._killed = True
            if self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)


class WorkerPool:
    """`width` workers at once, of which a tenant has one; tenants take turns. Used from one event loop."""

    def __init__(self, width: int):
        self._width = width
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="weft-worker")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, in the order in which their turns come; no tenant has an empty one."""
        self._running: Counter[str] = Counter()
        self._workers: set[WorkerProcess] = set()

    @property
    def num_running(self) -> int:
        """Workers that have not ended."""
        return self._running.total()

    async def call(self, tenant: str, work: Callable[[WorkerProcess], T], charge: Charge | None = None) -> T:
        """What `work` returns, which is called on a thread when it is the tenant's turn. Where this is cancelled, the
        worker is killed, and its place is free when it has ended. `charge` is called once, at any ending."""
        await self._turn(tenant)
        worker = WorkerProcess()
        self._workers.add(worker)
        try:
            job = asyncio.get_running_loop().run_in_executor(self._threads, work, worker)
        except RuntimeError as error:
            worker.kill()  # the job is in the executor's queue all the same
            self._workers.discard(worker)
            self._leave(tenant)
            raise Overloaded(
                f"the server cannot start a thread ({error}); try again, or raise its limit of threads"
            ) from error

        def ended(job: asyncio.Future[T]) -> None:
            # A callback, before that of the task that waits for the job. The task may be cancelled at any time, also
            # twice, and then nothing else asks for the job's exception.
            job.exception()
            self._workers.discard(worker)
            try:
                if charge is not None:
                    charge(worker.cpu_s)
            finally:
                self._leave(tenant)

        job.add_done_callback(ended)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if not job.done():
                worker.kill()
                await asyncio.wait({job})
            raise

    async def close(self) -> None:
        """Kill all that run. Nothing may be called any more."""
        for worker in self._workers:
            worker.kill()
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)

    async def _turn(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(tenant)
            else:
                self._withdraw(tenant, turn)
            raise

    def _admit(self) -> None:
        for tenant in list(self._waiting):
            if self.num_running >= self._width:
                return
            while not self._running[tenant] and tenant in self._waiting:
                turn = self._waiting[tenant][0]
                self._withdraw(tenant, turn)
                if not turn.cancelled():
                    self._running[tenant] += 1
                    turn.set_result(None)

    def _withdraw(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """It waits no longer. One that was cancelled may be withdrawn before its task notices."""
        waiting = self._waiting.get(tenant, deque())
        if turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[tenant]

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        waiting = self._waiting.pop(tenant, None)
        if waiting is not None:
            self._waiting[tenant] = waiting  # behind all others
        self._admit()
