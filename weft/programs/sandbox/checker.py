"""Whether an upload may be a program: decided in a limited process, once for each content.

Owns the bounds on that process and what was decided. The front uses one for uploads and for sources that are run
without being uploaded, a program host one for sources that programs launch. Neither ever parses a user's code itself.
"""

from __future__ import annotations

import signal
from collections import OrderedDict

from weft.abi.errors import InvalidRequest, WeftError
from weft.programs.registry import Code
from weft.programs.sandbox.check_worker import THE_PROGRAM
from weft.programs.sandbox.workers import Charge, WorkerPool, WorkerProcess

CHECK_CPU_S = 5
CHECK_BYTES = 1 << 30
"""Address space of the process that checks."""
MAX_VERDICTS = 4096
WIDTH = 2

_MODULE = "weft.programs.sandbox.check_worker"
_OUT_OF_MEMORY = 2
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals of a process whose own code is at fault."""


class CodeChecker:
    """Used from one event loop. `close` ends what it has started."""

    def __init__(self) -> None:
        self._pool = WorkerPool(WIDTH)
        self._verdicts: OrderedDict[tuple[str, str], str | None] = OrderedDict()
        """By kind and hash: why it is refused, or None. What was not asked for longest goes first."""

    async def check(self, tenant: str, code: Code, charge: Charge | None = None) -> None:
        """Raise `InvalidRequest` for content that is not a program, or takes too much to be parsed. Where this is
        cancelled, the process is killed. `charge` gets its processor time."""
        key = (code.kind, code.hash)
        if key not in self._verdicts:
            verdict = await self._pool.call(tenant, lambda worker: self._verdict(code, worker), charge)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        problem = self._verdicts[key]
        if problem is not None:
            raise _refusal(problem, code)

    async def close(self) -> None:
        """Kill the processes that check."""
        await self._pool.close()

    def _verdict(self, code: Code, worker: WorkerProcess) -> str | None:
        """On a thread."""
        key = (code.kind, code.hash)
        # The same content may have been checked while this waited for its turn.
        return self._verdicts[key] if key in self._verdicts else _problem(code, worker)


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
