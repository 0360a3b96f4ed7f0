"""Values that a run on a server waits for: of `external` nodes, and of functions that its client calls.

A variable's id follows from the run, the row and the node, so it is the same after a restart of the server; the id of a
run cannot be guessed. An answer is on the disk before the run goes on with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, NotSettable, NoValue, Overloaded, UnknownVariable, from_kind
from weft.store.workflow_variables import AskedVariable, WorkflowVariableTable
from weft.threads import FairThreads
from weft.workflow.graph.schema_check import schema_mistake
from weft.workflow.graph.values import TOO_DEEP, is_too_deep
from weft.workflow.run.functions import MAX_VALUE_BYTES, no_value_within, time_limit
from weft.workflow.run.instructions import AwaitExternal, CallFunction, TaskName
from weft.workflow.run.slots import RowSlots
from weft.workflow.service.live_run import RunWait, WorkflowRun

PREFIX = "wvar-"
"""Of the ids of these variables."""
MAX_ASKING = 8
"""Variables of one run that are being entered in the table at once. A run may ask for 10,000 at the same moment."""


class VariableAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a variable was set to."""

    value: Any = None
    error: str | None = None
    """Why there is no value: its row fails."""
    kind: str = "external"
    """Of the error."""


class _Waiting(NamedTuple):
    owner: RunVariables
    wait: RunWait
    answer: asyncio.Future[VariableAnswer]


class WaitingVariables:
    """The variables that runs of this server wait for, by id. Used from one event loop."""

    def __init__(self, table: WorkflowVariableTable, threads: FairThreads, table_threads: FairThreads):
        """`threads` check values, `table_threads` call the table."""
        self.table = table
        self.table_threads = table_threads
        self._threads = threads
        self.by_id: dict[str, _Waiting] = {}
        self.is_ending: Callable[[str], bool] = lambda run: False
        """Whether a run of this server is over, though the store may not know it yet."""
        self._setting: set[asyncio.Task[None]] = set()

    async def set(self, tenant: str, id: str, answer: VariableAnswer) -> None:
        """Set a variable, once. Raises `UnknownVariable`, `NotSettable` for the second time, `NoValue` if nothing waits
        for it any more, `Overloaded` if nothing waits for it yet after an interruption, `InvalidRequest` for a value
        that does not follow its schema, `StorageFailed`."""
        # A client that disconnects must not stop this between the store and the run: the run would wait for ever.
        task = asyncio.get_running_loop().create_task(self._set(tenant, id, answer))
        self._setting.add(task)
        task.add_done_callback(self._setting.discard)
        await asyncio.shield(task)

    async def _set(self, tenant: str, id: str, answer: VariableAnswer) -> None:
        find = partial(self.table_threads.run, partial(self.table.find, tenant, id), tenant=tenant)
        waiting = self.by_id.get(id)
        if waiting is not None and waiting.owner.tenant != tenant:
            waiting = None
        encoded = b""
        if waiting is not None:
            encoded = await self._threads.run(partial(_encoded, waiting.wait, answer), tenant=tenant)
        # Its row may have ended meanwhile.
        if waiting is None or self.by_id.get(id) is not waiting:
            known = await find()
            if known is None:
                raise UnknownVariable(f"There is no variable {id[:200]!r}.", "variable")
            if known.is_set:
                raise _already_set(id)
            if not known.is_over and not self.is_ending(known.run):
                # Its run may have ended between the two.
                known = await find() or known
            if known.is_over or self.is_ending(known.run):
                raise NoValue(f"Nothing waits for {id}: its row or its run has ended.", "variable")
            # A server that has started again waits for its engines, and then comes to the node again.
            raise Overloaded(f"The run of {id} was interrupted and has not come to it again yet: send it again.")
        if not await self.table_threads.run(partial(self.table.set, tenant, id, encoded), tenant=tenant):
            raise _already_set(id)
        if not waiting.answer.done():
            waiting.answer.set_result(answer)


class RunVariables:
    """The variables of one run while it is carried out."""

    def __init__(self, run: WorkflowRun, waiting: WaitingVariables):
        self._run = run
        self._waiting = waiting
        self._attempts: dict[int, dict[TaskName, int]] = {}
        """Of rows in progress, the next number of each task that has asked for a value."""
        self._numbers = itertools.count(1)
        self._asking = RowSlots(MAX_ASKING)

    @property
    def tenant(self) -> str:
        """The tenant of the run."""
        return self._run.record.tenant

    async def external(self, asked: AwaitExternal) -> Any:
        """Wait for the value of an `external` node. Raises what it was set to, and `RowError` if it came too late."""
        node = asked.node
        return await self._value(asked.task, schema=node.schema, timeout_s=node.timeout_s)

    async def function(self, asked: CallFunction) -> Any:
        """Wait until the client has called a function. Raises what it raised."""
        return await self._value(asked.task, function=asked.node.name, args=asked.args)

    def row_ended(self, row: int) -> None:
        """The values of a row are needed no longer."""
        self._attempts.pop(row, None)

    async def _value(
        self,
        task: TaskName,
        *,
        function: str | None = None,
        args: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        async with self._asking.of(task.row):
            id, known = await self._ask(task)
        if known.answer is None:
            until_s = None if timeout_s is None else known.asked_s + timeout_s
            wait = RunWait(
                number=next(self._numbers),
                id=id,
                row=task.row,
                node=task.path,
                function=function,
                args=args,
                schema=schema,
                since_s=known.asked_s,
                until_s=until_s,
            )
            answer = await self._answer(wait, no_value_within(timeout_s))
        else:
            answer = msgspec.json.decode(known.answer, type=VariableAnswer)
        if answer.error is not None:
            raise from_kind(answer.kind, answer.error)
        return answer.value

    async def _ask(self, task: TaskName) -> tuple[str, AskedVariable]:
        """Ask for the value of the next attempt at a task. Returns the id of its variable too."""
        table, run = self._waiting.table, self._run.id
        on_thread = partial(self._waiting.table_threads.run, tenant=self.tenant)
        attempts = self._attempts.setdefault(task.row, {})
        attempt = attempts.get(task)
        if attempt is None:
            attempt = max(await on_thread(partial(table.latest_attempt, run, *task)), 1)
        id = _variable_id(run, task, attempt)
        known = await on_thread(partial(table.ask, id, run, *task, attempt, time.time()))
        attempts[task] = attempt + 1
        return id, known

    async def _answer(self, wait: RunWait, too_late: str) -> VariableAnswer:
        future: asyncio.Future[VariableAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.by_id[wait.id] = _Waiting(self, wait, future)
        self._run.waits[wait.id] = wait
        self._run.notify()
        try:
            left_s = None if wait.until_s is None else max(wait.until_s - time.time(), 0.0)
            async with time_limit(left_s, too_late):
                return await future
        finally:
            del self._waiting.by_id[wait.id], self._run.waits[wait.id]
            self._run.notify()


def is_run_variable(id: str) -> bool:
    """Whether an id is of a variable of a workflow's run."""
    return id.startswith(PREFIX)


def _variable_id(run: str, task: TaskName, attempt: int) -> str:
    return PREFIX + hashlib.sha256(f"{run} {task} {attempt}".encode()).hexdigest()[:32]


def _already_set(id: str) -> NotSettable:
    return NotSettable(f"{id} has its value already: a variable is set once.", "variable")


def _encoded(wait: RunWait, answer: VariableAnswer) -> bytes:
    """The answer as JSON. Raises `InvalidRequest` where it is too large or does not follow its schema."""
    if answer.error is None and wait.schema is not None:
        mistake = schema_mistake(wait.schema, answer.value)
        if mistake is not None:
            raise InvalidRequest(f"The value of {wait.node} does not follow its schema: {mistake}.", "value")
    if is_too_deep(answer.value):
        raise InvalidRequest(f"A value of {wait.node} cannot be nested so: {TOO_DEEP}.", "value")
    encoded = msgspec.json.encode(answer)
    if len(encoded) > MAX_VALUE_BYTES:
        raise InvalidRequest(
            f"A value has {MAX_VALUE_BYTES >> 20} MiB at most, this one {len(encoded) >> 20}.", "value"
        )
    return encoded
