"""Calls that are under way: answered by a coroutine, or by an operation of the engine.

Owns how each ends, is given up, and is dropped with its run. The traits of a run begin them, by `answer_by_task` and
`answer_by_operation`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from weft.abi.errors import WeftError
from weft.core.waits import WaitKind
from weft.programs.operations import EngineOperation
from weft.programs.run.calls.pending_calls import PendingCalls

T = TypeVar("T")


class ChargedCoroutine(Coroutine[Any, Any, T]):
    """A coroutine that reports to `charge` how many seconds of the loop each of its steps takes."""

    def __init__(self, work: Coroutine[Any, Any, T], charge: Callable[[float], None]):
        self._work, self._charge = work, charge

    def send(self, value: Any) -> Any:
        """Run the coroutine to where it waits next, and charge it."""
        began_s = time.perf_counter()
        try:
            return self._work.send(value)
        finally:
            self._charge(time.perf_counter() - began_s)

    def throw(self, *error: Any) -> Any:
        """The same, with an error raised in it."""
        began_s = time.perf_counter()
        try:
            return self._work.throw(*error)
        finally:
            self._charge(time.perf_counter() - began_s)

    def close(self) -> None:
        """Close the coroutine without running it."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()


class TaskCall:
    """A call that a coroutine answers. What it computes is charged to the run."""

    def __init__(
        self,
        calls: PendingCalls,
        call: int,
        work: Coroutine[Any, Any, tuple[bytes, ...]],
        *,
        held: int,
        wait: WaitKind | None,
    ):
        self._calls, self._call, self._held = calls, call, held
        self._waits_since = None if wait is None else calls.loop.time()
        self._task = calls.loop.create_task(ChargedCoroutine(work, calls.charge))
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """The program hears at once; the coroutine cleans up in its own time."""
        self._calls.cancelled(self._call)
        self._task.cancel()

    def drop(self) -> None:
        """The run has ended: cancel the task."""
        self._task.cancel()

    def _done(self, task: asyncio.Task[tuple[bytes, ...]]) -> None:
        calls = self._calls
        calls.let_go(self._held)
        if self._waits_since is not None:
            calls.waited_s += calls.loop.time() - self._waits_since
        error = None if task.cancelled() else task.exception()
        if not calls.is_pending(self._call, self):
            return
        if task.cancelled():
            calls.cancelled(self._call)
        elif error is not None:
            calls.error(self._call, calls.as_reported(error))
        else:
            calls.result(self._call, *task.result())


class OperationCall:
    """A call that an operation of the engine answers. It is the operation's mailbox: no task waits."""

    __slots__ = ("_call", "_calls", "_ended", "on_cancel", "on_end", "operation")

    def __init__(
        self, calls: PendingCalls, call: int, operation: EngineOperation, ended: Callable[[], tuple[bytes, ...]]
    ):
        self._calls, self._call, self._ended = calls, call, ended
        self.operation = operation
        self.on_cancel: Callable[[], None] | None = None
        """Ends it on the engine, which then reports how far it came. None: it is only given up."""
        self.on_end: Callable[[bool], None] | None = None
        """Called once with whether it finished, also where the program had given it up, but not after the run's end."""
        operation.report_to(self)
        if operation.ended:
            calls.loop.call_soon(self.wake)

    def wake(self) -> None:
        """The operation has ended: it has no other events."""
        operation, calls = self.operation, self._calls
        if not operation.ended or calls.closed:
            return
        well = operation.error is None and operation.finished is not None
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(well)
        if not calls.is_pending(self._call, self):
            return
        if operation.error is not None:
            calls.error(self._call, operation.error)
        elif not well:
            calls.cancelled(self._call)
        else:
            try:
                blobs = self._ended()
            except Exception as error:
                calls.error(self._call, calls.as_reported(error))
            else:
                calls.result(self._call, *blobs)

    def cancel(self) -> None:
        """The program gives it up."""
        if self.on_cancel is not None:
            self.on_cancel()
        else:
            self._calls.cancelled(self._call)

    def drop(self) -> None:
        """The owner of the sequence or the space gives it back."""


def answer_by_task(
    calls: PendingCalls,
    call: int,
    work: Coroutine[Any, Any, tuple[bytes, ...]],
    *,
    held: int = 0,
    wait: WaitKind | None = None,
) -> None:
    """Have a coroutine answer the call. `held`: bytes that it keeps meanwhile. `wait`: what the call waits for that is
    not the device. Raises as `PendingCalls.check_free`."""
    try:
        calls.check_free(call, held)
    except WeftError:
        work.close()
        raise
    calls.begin(call, TaskCall(calls, call, work, held=held, wait=wait), held)
    if wait is not None:
        calls.waits(wait)


def answer_by_operation(
    calls: PendingCalls, call: int, operation: EngineOperation, ended: Callable[[], tuple[bytes, ...]]
) -> OperationCall:
    """Have an operation of the engine answer the call; `ended` makes its result once it ended without an error. Raises
    as `PendingCalls.check_free`."""
    pending = OperationCall(calls, call, operation, ended)
    calls.begin(call, pending)
    return pending
