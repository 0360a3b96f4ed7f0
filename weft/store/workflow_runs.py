"""Rows of workflows' runs: what has been computed, so that a run that was interrupted goes on.

Values are opaque. A row's values are kept until the row has ended; then its result replaces them.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from sqlalchemy import BindParameter, Connection, bindparam, delete, insert, select

from weft.store.database import Database
from weft.store.schema import workflow_rows, workflow_runs, workflow_seconds, workflow_tasks
from weft.store.sqlite import upsert

_THIS: BindParameter[str] = bindparam("this")
_FIND = select(workflow_runs.c.description).where(workflow_runs.c.run == _THIS)
_ROWS = select(workflow_rows.c.row, workflow_rows.c.result).where(workflow_rows.c.run == _THIS)
_TASKS = select(workflow_tasks.c.row, workflow_tasks.c.path, workflow_tasks.c.value).where(
    workflow_tasks.c.run == _THIS
)
_FORGET_TASKS = delete(workflow_tasks).where(
    workflow_tasks.c.run == _THIS, workflow_tasks.c.row == bindparam("this_row")
)
_FORGET_ALL_TASKS = delete(workflow_tasks).where(workflow_tasks.c.run == _THIS)
_PUT_ROW = upsert(workflow_rows)
_PUT_TASK = upsert(workflow_tasks)
_SECONDS = select(workflow_seconds.c.seconds).where(workflow_seconds.c.run == _THIS)
_PUT_SECONDS = upsert(workflow_seconds)
_FORGET = tuple(
    delete(table).where(table.c.run == _THIS)
    for table in (workflow_tasks, workflow_rows, workflow_seconds, workflow_runs)
)


class SavedRun(NamedTuple):
    """What is kept of a run."""

    rows: dict[int, bytes]
    """Results of rows that have ended."""
    tasks: dict[tuple[int, str], bytes]
    """(row, path of a node) -> value, of rows that have not."""
    seconds: float = 0.0
    """That the run has taken."""


class WorkflowRunTable:
    """The runs of a database. Every method raises `StorageFailed`."""

    def __init__(self, database: Database):
        self._database = database

    def begin(self, run: str, description: bytes) -> bytes:
        """Begin a run, or find the one that was begun. Returns its description. Blocks."""

        def work(connection: Connection) -> bytes:
            found: bytes | None = connection.execute(_FIND, {"this": run}).scalar()
            if found is None:
                connection.execute(insert(workflow_runs).values(run=run, description=description))
            return description if found is None else found

        return self._database.write(work).result()

    def load(self, run: str) -> SavedRun:
        """What is kept of a run. Blocks."""

        def work(connection: Connection) -> SavedRun:
            rows: dict[int, bytes] = {}
            for row, result in connection.execute(_ROWS, {"this": run}):
                rows[row] = result
            return SavedRun(rows, _tasks(connection, run), _seconds(connection, run))

        return self._database.read(work)

    def tasks(self, run: str) -> dict[tuple[int, str], bytes]:
        """Values of nodes as in `SavedRun.tasks`. Blocks."""
        return self._database.read(lambda connection: _tasks(connection, run))

    def forget_tasks(self, run: str) -> None:
        """Remove all values of nodes of a run. Blocks."""
        self._database.write(lambda connection: connection.execute(_FORGET_ALL_TASKS, {"this": run})).result()

    def seconds(self, run: str) -> float:
        """As `SavedRun.seconds`. Blocks."""
        return self._database.read(lambda connection: _seconds(connection, run))

    def keep_seconds(self, run: str, seconds: float, tenant: str = "") -> Future[None]:
        """Keep how long a run has taken. The future is done after the commit. `tenant` as of `keep_task`."""

        def work(connection: Connection) -> None:
            connection.execute(_PUT_SECONDS, {"run": run, "seconds": seconds})

        return self._database.write(work, tenant)

    def keep_task(self, run: str, row: int, path: str, value: bytes, tenant: str = "") -> Future[None]:
        """Keep the value of a node. The future is done after the commit. Only writes of one tenant stay in their order:
        `tenant` is the one for which the end of the row is written."""

        def work(connection: Connection) -> None:
            connection.execute(_PUT_TASK, {"run": run, "row": row, "path": path, "value": value})

        return self._database.write(work, tenant)

    def end_row(self, run: str, row: int, result: bytes) -> Future[None]:
        """Keep the result of a row instead of its nodes' values. The future is done after the commit."""

        def work(connection: Connection) -> None:
            connection.execute(_PUT_ROW, {"run": run, "row": row, "result": result})
            connection.execute(_FORGET_TASKS, {"this": run, "this_row": row})

        return self._database.write(work)

    def forget(self, run: str) -> None:
        """Remove a run with its rows and the values of their nodes. Blocks."""

        def work(connection: Connection) -> None:
            for statement in _FORGET:
                connection.execute(statement, {"this": run})

        self._database.write(work).result()


def _tasks(connection: Connection, run: str) -> dict[tuple[int, str], bytes]:
    return {(row, path): value for row, path, value in connection.execute(_TASKS, {"this": run})}


def _seconds(connection: Connection, run: str) -> float:
    return connection.execute(_SECONDS, {"this": run}).scalar() or 0.0
