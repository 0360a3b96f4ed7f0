"""The journal of a run: what is known already when the run goes on after an interruption.

Each value from outside (an answer, a function's result) is kept under the name of its task, which is the same in every
run of the graph over the same rows; all else follows from these again. Writing does not hold the run up: what was in
flight, or not yet committed, is repeated. So is what cannot be written: a full disk does not end the run, which has
what it computed in memory, but it is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import ConfigError, StorageFailed
from weft.store.database import Database
from weft.store.workflow_runs import SavedRun, WorkflowRunTable
from weft.workflow.actuals import CallCounts, RunCounts
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.instructions import TaskName
from weft.workflow.run.ledger import added, total
from weft.workflow.run.results import RowMistake, RowResult

_log = logging.getLogger("weft.workflow")


class RunDescription(msgspec.Struct, frozen=True):
    """What a run computes: another graph, other rows or another model is another run."""

    graph: str = msgspec.field(name="graph_with_ids")
    """The `journal_digest` of what is executed. Descriptions of earlier versions have a field `graph`, a digest without
    ids, which does not say whose values the journal has."""
    rows: str
    model: str


class _EndedRow(NamedTuple):
    """What is kept of a row that has ended."""

    row: int
    outputs: Mapping[str, Any]
    error: RowMistake | None = None
    by_node: Mapping[str, CallCounts] = {}
    """What its calls did, those before it began anew included."""


class _KeptAnswer(msgspec.Struct):
    """The answer among what is kept of a task."""

    answer: ModelAnswer | None = None


class RunJournal:
    """One run in a database."""

    def __init__(
        self, table: WorkflowRunTable, run: str, saved: SavedRun, tenant: str = "", *, keeps_seconds: bool = True
    ):
        """`saved` is what the table has of the run. `keeps_seconds`: whether a later execution may have a limit of
        seconds."""
        self._table = table
        self._run = run
        self._tenant = tenant
        ended = [msgspec.json.decode(result, type=_EndedRow) for result in saved.rows.values()]
        self.rows = {each.row: RowResult(each.row, each.outputs) for each in ended if each.error is None}
        """Results of rows that have ended. Those that failed begin anew: what failed may work now."""
        self._failed = {each.row: each.by_node for each in ended if each.error is not None}
        by_node: dict[str, CallCounts] = {}
        for each in ended:
            by_node = added(by_node, each.by_node)
        self.counts = RunCounts(len(self.rows), 0, total(by_node.values()), by_node)
        """Of these rows, and of the calls of those that begin anew."""
        self.answered = _answered(saved.tasks.values())
        """What was answered in rows that have not ended."""
        self.seconds = saved.seconds
        """Seconds that the run has taken before."""
        self._keeps_seconds = keeps_seconds
        self._tasks = saved.tasks
        self.is_empty = not saved.rows and not saved.tasks
        """Whether there is nothing to go on from."""
        self.num_lost = 0
        """Values and results that could not be kept, as far as is known."""

    @classmethod
    def open(cls, database: Database, run: str, description: RunDescription) -> RunJournal:
        """Begin a run, or go on with the one that is there. Blocks. Raises `ConfigError` where a run of this name
        computes something else, or was begun by another version of Weft, and `StorageFailed`."""
        table = WorkflowRunTable(database)
        try:
            found = msgspec.json.decode(table.begin(run, msgspec.json.encode(description)), type=RunDescription)
        except msgspec.ValidationError:
            raise ConfigError("a run of another version of Weft was interrupted here") from None
        if found != description:
            fields = RunDescription.__struct_fields__
            other = " and ".join(name for name in fields if getattr(found, name) != getattr(description, name))
            raise ConfigError(f"another run was interrupted here, with another {other}")
        return cls(table, run, table.load(run))

    def take(self, task: TaskName) -> Any:
        """What a task gave before: a `ModelAnswer` of a call, else its value; `msgspec.UNSET` where it is not known."""
        found = self._tasks.pop(task, None)
        if found is None:
            return msgspec.UNSET
        kept = msgspec.json.decode(found)
        return msgspec.convert(kept["answer"], ModelAnswer) if "answer" in kept else kept["value"]

    def keep(self, task: TaskName, value: Any) -> None:
        """Note what a task gave."""
        kept = {"answer": value} if isinstance(value, ModelAnswer) else {"value": value}
        encoded = msgspec.json.encode(kept)
        self._note(self._table.keep_task(self._run, task.row, task.path, encoded, self._tenant))

    def keep_seconds(self, seconds: float) -> None:
        """Note the seconds that the run has taken so far."""
        if self._keeps_seconds:
            with suppress(StorageFailed):  # a run that goes on counts from what was noted before
                self._table.keep_seconds(self._run, seconds, self._tenant)

    def end(self, result: RowResult, by_node: Mapping[str, CallCounts]) -> None:
        """Note the result of a row, and what its calls did, instead of the values of its nodes."""
        ended = _EndedRow(*result, added(self._failed.get(result.row, {}), by_node))
        self._note(self._table.end_row(self._run, result.row, msgspec.json.encode(ended)))

    def forget(self) -> None:
        """The run has ended and been read. Blocks. Raises `StorageFailed`."""
        self._table.forget(self._run)

    def _note(self, written: Future[None]) -> None:
        self.is_empty = False
        written.add_done_callback(self._written)

    def _written(self, written: Future[None]) -> None:
        """On the thread that writes. The database has said where and why; this says what it means, once."""
        if written.exception() is None:
            return
        self.num_lost += 1
        if self.num_lost == 1:
            _log.warning("the run goes on; if it is interrupted, what could not be kept is computed again")


def _answered(tasks: Iterable[bytes]) -> CallCounts:
    """What the calls did whose answers are among what is kept of tasks."""
    counts = CallCounts()
    for kept in tasks:
        answer = msgspec.json.decode(kept, type=_KeptAnswer).answer
        if answer is not None:
            counts = counts.plus(answer.usage, is_cached=answer.is_cached)
    return counts
