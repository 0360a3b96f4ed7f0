"""`SpaceHandle`: explicit pages and embeddings of one program, from asyncio.

Owns what a program has put on its queues and which of it has not ended. Numbers of queues, pages and embeddings are the
program's own; they mean something in this space alone, so a forged one cannot reach another program. The engine
defines what a command does (`weft.core.wire`, `weft.sched.spaces`). Used from one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from weft.abi.errors import EngineDead, UnknownHandle, WeftError
from weft.core.waits import WaitKind
from weft.core.wire import (
    LEASE_ENDED,
    AnsweredCommand,
    CloseQueue,
    CloseSpace,
    ExpectSpace,
    OpenSpace,
    OperationUsage,
    QueueCommand,
    Sync,
)
from weft.programs.engine_link import EngineLink
from weft.programs.operations import EngineOperation, Report
from weft.programs.types import Caller

MAX_SILENT = 512
"""Commands without an answer before one is asked for, so that what is remembered of them stays bounded."""

NO_QUEUE = -1
"""Of the command that opens the space."""

OnFailure = Callable[[int, WeftError], None]
"""(call, error): a command without an answer has failed. `call` is the caller's own number of it."""


class _Silent(EngineOperation):
    """A command that reports nothing unless it fails."""

    __slots__ = ("_call", "_on_failure", "queue")

    def __init__(self, op: int, space_id: int, queue: int, call: int, on_failure: OnFailure):
        super().__init__(op, space_id)
        self.queue = queue
        self._call = call
        self._on_failure = on_failure

    def fail(self, error: WeftError, usage: OperationUsage | None = None) -> None:
        """Tell the program."""
        super().fail(error, usage)
        self._on_failure(self._call, error)


class SpaceHandle:
    """Pages and embeddings on an engine as one program holds them. Every method returns at once; a `Report` may be
    awaited."""

    def __init__(self, link: EngineLink, caller: Caller, reserve_pages: int, tenant_pages: int | None = None):
        self._id = space = link.number()
        self.on_failure: OnFailure = lambda call, error: None
        self.contents: Callable[[], str] = lambda: ""
        """What the program has in it, for the error that says that it is lost."""
        self._link = link
        self._open = True
        self._error: WeftError | None = None
        self._died_with_engine = False
        self._answered: dict[int, QueueReport] = {}
        self._syncs: dict[int, QueueReport] = {}
        """Asked for here, so that `_silent` stays bounded."""
        self._silent: dict[int, deque[_Silent]] = {}
        """By queue; no queue without one."""
        self._expected: WaitKind | None = None
        """What the engine was told that the program waits for, since the last command."""
        self._opening = op = self._number()
        link.add_handle(self)
        link.add_operation(_Silent(op, space, NO_QUEUE, 0, lambda call, error: self.lose(error)))
        link.post(
            OpenSpace(
                space=space,
                op=op,
                tenant=caller.tenant,
                namespace=caller.namespace,
                priority=caller.priority,
                request_id=caller.request_id,
                reserve_pages=reserve_pages,
                tenant_pages=tenant_pages,
            )
        )

    def post(
        self,
        command: type[QueueCommand],
        queue: int,
        *values: Any,
        call: int = 0,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Put a silent command on a queue, with the values of its fields in their order. `on_failure`, or else the
        space's own, gets `call` and the error where it fails."""
        # Nothing comes on a closed queue after which its commands could be forgotten. After this they are.
        closing = self._sync(queue) if command is CloseQueue else None
        op = self._begin()
        if closing is not None:
            closing.last_before = op
        posted = command(self._id, queue, op, *values)
        silent = self._silent.setdefault(queue, deque())
        operation = _Silent(op, self._id, queue, call, on_failure or self._failed)
        silent.append(operation)
        self._link.add_operation(operation)
        self._link.post(posted)
        if len(silent) >= MAX_SILENT:
            self._sync(queue)

    def ask(self, command: type[AnsweredCommand], queue: int, *values: Any) -> QueueReport:
        """Put a command that answers on a queue, with the values of its fields in their order."""
        return self._ask(self._answered, command, queue, *values)

    def begin_wait(self, kind: WaitKind, expected_in_s: float | None) -> None:
        """Tell the engine what the program waits for, unless that is the answer to a command. Does nothing where the
        engine knows."""
        if not self._open or self._error is not None or self._answered:
            return
        if kind is not self._expected or expected_in_s is not None:
            self._expected = kind
            self._link.post(ExpectSpace(space=self._id, kind=kind, expected_in_s=expected_in_s))

    @property
    def id(self) -> int:
        """The number of the space on the engine."""
        return self._id

    @property
    def is_lost(self) -> bool:
        """Whether it failed to open, or its engine is gone."""
        return self._error is not None

    # ---- life

    def release(self) -> None:
        """Give everything up, exports excepted. Does nothing the second time."""
        if not self._open:
            return
        self._open = False
        self._forget(lambda operation: operation.cancel())
        self._link.remove_handle(self)
        # Also where it is lost as far as is known here: an engine that lives may hold it.
        if not self._died_with_engine:
            self._link.post(CloseSpace(space=self._id))

    # ---- for EngineLink

    def fail(self, operation: EngineOperation, error: WeftError, usage: OperationUsage) -> None:
        """An operation has failed; the others go on, unless the space itself is gone."""
        if isinstance(error, UnknownHandle) and error.param in ("space", LEASE_ENDED):
            # It is open here, and its engine lives: nothing but the end of the lease closes it there.
            why = "the engine heard nothing from this process for as long as its lease (`lease_s`)"
            self.lose(EngineDead(why + " and released this space" + self.contents()))
            error = self._error or error
        elif isinstance(error, EngineDead):
            self.lose(error, engine_died=True)
            error = self._error or error
        operation.fail(error)

    def lose(self, error: WeftError, *, engine_died: bool = False) -> None:
        """Fail everything that waits here, and everything that will be asked. `engine_died`: the engine that held it is
        gone, so that there is nothing to give back."""
        if engine_died and self._error is None:
            error = EngineDead(error.message + self.contents())
        self._error = self._error or error
        self._died_with_engine = self._died_with_engine or engine_died
        self._forget(lambda operation: operation.fail(error))

    def ended(self, operation: EngineOperation) -> None:
        """Forget an operation, and the silent ones before it on its queue: commands of a queue run in order."""
        self._answered.pop(operation.op, None)
        self._syncs.pop(operation.op, None)
        if not isinstance(operation, QueueReport | _Silent) or operation.queue not in self._silent:
            return
        silent = self._silent[operation.queue]
        if isinstance(operation, QueueReport):
            last = operation.op if operation.finished is None else operation.last_before
            while silent and silent[0].op <= last:
                self._link.remove_operation(silent.popleft().op)
        # Commands that were refused when they came have failed before earlier ones were carried out.
        while silent and silent[0].ended:
            silent.popleft()
        while silent and silent[-1].ended:
            silent.pop()
        if not silent:
            del self._silent[operation.queue]

    # ---- inside

    def _check(self) -> None:
        if not self._open:
            raise UnknownHandle("this space was given up; open another one")
        if self._error is not None:
            raise self._error

    def _ask(
        self, reports: dict[int, QueueReport], command: type[AnsweredCommand], queue: int, *values: Any
    ) -> QueueReport:
        op = self._begin()
        posted = command(self._id, queue, op, *values)
        report = reports[op] = QueueReport(op, self._id, queue)
        self._link.add_operation(report)
        self._link.post(posted)
        return report

    def _sync(self, queue: int) -> QueueReport:
        return self._ask(self._syncs, Sync, queue)

    def _number(self) -> int:
        self._check()
        return self._link.number()

    def _begin(self) -> int:
        """The number of a new command, which ends what the engine was told of a wait."""
        self._expected = None
        return self._number()

    def _failed(self, call: int, error: WeftError) -> None:
        self.on_failure(call, error)

    def _forget(self, end: Callable[[EngineOperation], None]) -> None:
        silent = (operation for queue in self._silent.values() for operation in queue)
        operations: list[EngineOperation] = [*self._answered.values(), *self._syncs.values(), *silent]
        self._answered.clear()
        self._syncs.clear()
        self._silent.clear()
        self._link.remove_operation(self._opening)
        for operation in operations:
            self._link.remove_operation(operation.op)
            operation.cancelled_by_program = True
            end(operation)
            operation.wake()


class QueueReport(Report):
    """A command on a queue. Awaiting it gives its `Finished`; raises what it failed with."""

    __slots__ = ("last_before", "queue")

    def __init__(self, op: int, space_id: int, queue: int):
        super().__init__(op, space_id)
        self.queue = queue
        self.last_before = op
        """The last of the queue's commands that has been carried out when this ends well."""
