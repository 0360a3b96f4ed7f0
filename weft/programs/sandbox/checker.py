"""Whether an upload may be a program: decided in a limited process, once for each content and tenant.

Owns the bounds on that process and what was decided. The front uses one for uploads and for sources that are run
without being uploaded, a program host one for sources that programs launch. Neither ever parses a user's code itself.
"""

from __future__ import annotations

import signal
import threading
from typing import NamedTuple

from weft.abi.errors import InvalidRequest, WeftError
from weft.programs.registry import Code
from weft.programs.sandbox.check_worker import THE_PROGRAM
from weft.programs.sandbox.workers import Charge, WorkerPool, WorkerProcess
from weft.tenant_cache import TenantCache

CHECK_CPU_S = 5
CHECK_BYTES = 1 << 30
"""Address space of the process that checks."""
MAX_TENANT_VERDICTS, MAX_VERDICTS = 1024, 4096
WIDTH = 2

_MODULE = "weft.programs.sandbox.check_worker"
_OUT_OF_MEMORY = 2
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals of a process whose own code is at fault."""


class _Verdict(NamedTuple):
    problem: str | None
    """Why the content is refused."""


class CodeChecker:
    """Used from one event loop. `close` ends what it has started."""

    def __init__(self) -> None:
        self._pool = WorkerPool(WIDTH)
        self._verdicts: TenantCache[tuple[str, str], _Verdict] = TenantCache(MAX_TENANT_VERDICTS, MAX_VERDICTS)
        """By tenant, and by kind and hash. A verdict that tenants shared would tell one, by the time that its request
        takes, which programs the others have. Guarded by `_lock`: threads add to it, so that the next job of a tenant
        finds what its last one has decided."""
        self._lock = threading.Lock()

    async def check(self, tenant: str, code: Code, charge: Charge | None = None) -> None:
        """Raise `InvalidRequest` for content that is not a program, or takes too much to be parsed. Where this is
        cancelled, the process is killed. `charge` gets its processor time."""
        verdict = self._known(tenant, code)
        if verdict is None:
            verdict = await self._pool.call(tenant, lambda worker: self._verdict(tenant, code, worker), charge)
        if verdict.problem is not None:
            raise _refusal(verdict.problem, code)

    async def close(self) -> None:
        """Kill the processes that check."""
        await self._pool.close()

    def _verdict(self, tenant: str, code: Code, worker: WorkerProcess) -> _Verdict:
        """On a thread."""
        # The same content may have been checked while this waited for its turn.
        found = self._known(tenant, code)
        if found is None:
            found = _Verdict(_problem(code, worker))
            with self._lock:
                self._verdicts.put(tenant, (code.kind, code.hash), found)
        return found

    def _known(self, tenant: str, code: Code) -> _Verdict | None:
        with self._lock:
            return self._verdicts.get(tenant, (code.kind, code.hash))


def check_now(code: Code) -> None:
    """Check one of the operator's own programs; blocks until its process ends. Raises `InvalidRequest`."""
    problem = _problem(code, WorkerProcess())
    if problem is not None:
        raise _refusal(problem, code)


def _refusal(problem: str, code: Code) -> InvalidRequest:
    place = f"{THE_PROGRAM}, line "
    named = f"{code.name or THE_PROGRAM}, line {problem.removeprefix(place)}" if problem.startswith(place) else problem
    return InvalidRequest(named, "source")


def _problem(code: Code, worker: WorkerProcess) -> str | None:
    try:
        ended = worker.run(_MODULE, [code.kind, str(CHECK_CPU_S), str(CHECK_BYTES)], code.content, bare=True)
    except OSError as error:
        raise WeftError(f"the program could not be checked: {error.strerror}; try again later") from error
    if ended.status == 0:
        return None
    if ended.status == 1:
        return ended.errors.strip()
    if ended.out_of_time:
        return f"The program takes more than {CHECK_CPU_S} s of processor time to be parsed; make it smaller."
    if ended.status < 0 and -ended.status not in _CRASHES:
        # By the system, for want of memory, or by a person: this says nothing of the program.
        raise WeftError("the process that checks programs was killed; try again later")
    if ended.status == _OUT_OF_MEMORY:
        most = f"{CHECK_BYTES >> 20} MiB of memory"
        return f"The program takes more than {most} to be parsed, or is nested too deeply; make it smaller."
    return "The program cannot be parsed: it makes the parser crash; make it smaller, or nest it less."
