"""Rows of workflows' runs on servers: records, inputs, results in the order in which they came.

Records, inputs and results are opaque. Owns which server carries a run out: the first server that finds a run whose
server is gone takes it over. Values of nodes of rows that have not ended are in `weft.store.workflow_runs`.

A run may have a million rows, and all writes wait for the one in progress. So a run is removed at once for readers, and
its rows in many small writes; `leftovers` has its id until none is left, also after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select, update

from weft.abi.errors import QuotaExceeded, StorageFailed
from weft.store.database import Database
from weft.store.schema import (
    leftovers,
    served_runs,
    workflow_endings,
    workflow_inputs,
    workflow_rows,
    workflow_seconds,
    workflow_tasks,
    workflow_traces,
    workflow_variables,
)
from weft.store.sqlite import delete_some, upsert

_run, _ending, _input = served_runs.c, workflow_endings.c, workflow_inputs.c
_THIS = _run.run == bindparam("this")
_OF = _run.tenant == bindparam("of_tenant")
_STORED = select(_run.run, _run.tenant, _run.created_s, _run.size_bytes, _run.record)
_FIND = _STORED.where(_THIS, _OF)
_KEYED = _STORED.where(_OF, _run.key == bindparam("of_key"))
_LIST = _STORED.where(_OF).order_by(_run.created_s.desc(), _run.run.desc())
_SIZE = select(func.sum(_run.size_bytes)).where(_OF)
_ALIVE = _STORED.add_columns(_run.server).where(_run.server.is_not(None)).order_by(_run.created_s)
_OWNER = select(_run.server).where(_THIS, _OF)
_IDLE = select(_run.run).where(_THIS, _OF, _run.server.is_(None))
_OWN = update(served_runs).where(_THIS).values(server=bindparam("by"), ended_s=None)
_SAVE = update(served_runs).where(_THIS).values(record=bindparam("now"))
_GROW = update(served_runs).where(_THIS).values(size_bytes=_run.size_bytes + bindparam("more"))
_END = update(served_runs).where(_THIS).values(server=None, ended_s=bindparam("at_s"))
_OLD = select(_run.run, _run.ended_s).where(_OF, _run.server.is_(None)).order_by(_run.ended_s.desc())
_NEXT_INPUTS = (
    select(_input.first, _input.rows)
    .where(_input.run == bindparam("this"), _input.first >= bindparam("least"))
    .order_by(_input.first)
    .limit(1)
)
_RESULTS = (
    select(_ending.number, workflow_rows.c.result)
    .join(workflow_rows, (workflow_rows.c.run == _ending.run) & (workflow_rows.c.row == _ending.row))
    .where(_ending.run == bindparam("this"), _ending.number > bindparam("after"))
    .order_by(_ending.number)
)
_NUM_ENDED = select(func.count(), func.coalesce(func.sum(_ending.failed), 0)).where(_ending.run == bindparam("this"))
_ENDINGS = select(_ending.number, _ending.row, _ending.failed).where(_ending.run == bindparam("this"))
_PUT_ROW = upsert(workflow_rows)
_NEXT_NUMBER = select(func.coalesce(func.max(_ending.number), 0) + 1).where(_ending.run == bindparam("this"))
_PUT_ENDING = insert(workflow_endings).values(
    run=bindparam("this"),
    number=_NEXT_NUMBER.scalar_subquery(),
    row=bindparam("this_row"),
    failed=bindparam("has_failed"),
)
_FORGET_ROW = delete(workflow_tasks).where(
    workflow_tasks.c.run == bindparam("this"), workflow_tasks.c.row == bindparam("this_row")
)
_variable = workflow_variables.c
_FORGET_ANSWERS = (
    update(workflow_variables)
    .where(_variable.run == bindparam("this"), _variable.row == bindparam("this_row"), _variable.answer.is_not(None))
    .values(answer=b"")
)
"""Of a row that has ended. That they were set is still known."""
_FORGET_TASKS = delete(workflow_tasks).where(workflow_tasks.c.run == bindparam("this"))
_FORGET = delete(served_runs).where(_THIS)
_LEAVE = insert(leftovers).values(path=bindparam("this"))
_LEFT = select(leftovers.c.path).order_by(leftovers.c.path)
_IS_LEFT = _LEFT.where(leftovers.c.path == bindparam("this"))
_CLEARED = delete(leftovers).where(leftovers.c.path == bindparam("this"))
_CLEAR = tuple(
    delete_some(table, bindparam("this"), bindparam("most"))
    for table in (
        workflow_inputs,
        workflow_tasks,
        workflow_rows,
        workflow_endings,
        workflow_traces,
        workflow_variables,
        workflow_seconds,
    )
)
_TRACED = (
    select(workflow_traces.c.row, workflow_traces.c.calls)
    .where(workflow_traces.c.run == bindparam("this"))
    .order_by(workflow_traces.c.row)
)
_PUT_TRACE = upsert(workflow_traces)


KNOWN_ROOM_BYTES = 4 << 20
"""By which a tenant's runs may grow before their sizes are added up again: by so much, servers with the same data may
exceed its limit together."""
CLEARED_ROWS = 1000
"""Rows of removed runs that one write deletes."""


class NewRun(NamedTuple):
    """What is stored of a run when it begins."""

    run: str
    tenant: str
    key: str | None
    """Of the client: a second run with it is the first one."""
    created_s: float
    record: bytes
    inputs: Sequence[tuple[int, bytes]]
    """(number of the first row, rows)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the inputs, which count towards the tenant's quota."""
        return sum(len(rows) for _, rows in self.inputs)


class StoredRun(NamedTuple):
    """A run as it was stored last."""

    run: str
    tenant: str
    created_s: float
    size_bytes: int
    record: bytes


class Endings(NamedTuple):
    """The rows of a run that have ended."""

    last: int
    """The highest number; 0 where none has ended."""
    rows: frozenset[int]
    num_failed: int


class NumberedResult(NamedTuple):
    """The result of a row, and its place in the order in which rows ended, from 1."""

    number: int
    result: bytes


class ServedRunTable:
    """The runs of a database. Every method raises `StorageFailed`."""

    def __init__(self, database: Database, max_bytes: int):
        """`max_bytes`: rows and results of all runs of a tenant."""
        self._database = database
        self._max_bytes = max_bytes
        self._room: dict[str, int] = {}
        """By tenant, bytes that are known to be free; of the thread that writes. A write that is repeated counts twice,
        until sizes are added up again."""

    # ---- runs

    def begin(self, new: NewRun) -> StoredRun:
        """Begin a run of this server. Returns it, or the run that began with the same key. Raises `QuotaExceeded` if
        the tenant's runs have no room for it. Blocks."""

        def work(connection: Connection) -> StoredRun:
            if new.key is not None:
                known = connection.execute(_KEYED, {"of_tenant": new.tenant, "of_key": new.key}).one_or_none()
                if known is not None:
                    return StoredRun(*known)
            self._take_room(connection, new.tenant, new.size_bytes, "delete some runs first")
            fields: dict[str, Any] = {"run": new.run, "tenant": new.tenant, "key": new.key, "record": new.record}
            fields |= {"created_s": new.created_s, "size_bytes": new.size_bytes, "server": self._server}
            connection.execute(insert(served_runs).values(**fields))
            connection.execute(
                insert(workflow_inputs), [{"run": new.run, "first": first, "rows": rows} for first, rows in new.inputs]
            )
            return StoredRun(new.run, new.tenant, new.created_s, new.size_bytes, new.record)

        return self._database.write(work, new.tenant).result()

    def find(self, tenant: str, run: str) -> StoredRun | None:
        """A run of a tenant. Blocks."""
        return self._one(_FIND, {"this": run, "of_tenant": tenant})

    def all(self, tenant: str) -> list[StoredRun]:
        """A tenant's runs, newest first. Blocks."""
        return self._database.read(
            lambda connection: [StoredRun(*row) for row in connection.execute(_LIST, {"of_tenant": tenant})]
        )

    def take_over(self, wanted: Callable[[StoredRun], bool]) -> list[StoredRun]:
        """Runs whose servers are gone, oldest first: those that are `wanted` are this server's now. Blocks. Goes on
        deleting rows of removed runs, where a server ended meanwhile."""
        if self._database.server is None or not self._database.exists():
            return []
        self._clear("", self._database.read(lambda connection: list(connection.execute(_LEFT).scalars())), Future())

        def work(connection: Connection) -> list[StoredRun]:
            taken = []
            for *row, owner in connection.execute(_ALIVE).all():
                run = StoredRun(*row)
                if self._is_gone(owner) and wanted(run):
                    connection.execute(_OWN, {"this": run.run, "by": self._server})
                    taken.append(run)
            return taken

        return self._database.write(work).result()

    def claim(self, tenant: str, run: str) -> bool:
        """Make a run whose server is gone this server's. Returns whether it is now. Blocks."""

        def work(connection: Connection) -> bool:
            owner = connection.execute(_OWNER, {"this": run, "of_tenant": tenant}).scalar()
            if owner is None or not self._is_gone(owner):
                return False
            connection.execute(_OWN, {"this": run, "by": self._server})
            return True

        return self._database.write(work, tenant).result()

    def reopen(self, tenant: str, run: str, record: bytes) -> bool:
        """Make a run that has ended one of this server. Returns whether it had ended. Blocks."""

        def work(connection: Connection) -> bool:
            if connection.execute(_IDLE, {"this": run, "of_tenant": tenant}).scalar() is None:
                return False
            connection.execute(_OWN, {"this": run, "by": self._server})
            connection.execute(_SAVE, {"this": run, "now": record})
            return True

        return self._database.write(work, tenant).result()

    def save(self, tenant: str, run: str, record: bytes) -> Future[None]:
        """Replace the record of a run in progress. The future is done after the commit, as those of the others."""

        def work(connection: Connection) -> None:
            connection.execute(_SAVE, {"this": run, "now": record})

        return self._database.write(work, tenant)

    def end(self, tenant: str, run: str, record: bytes, ended_s: float, *, is_complete: bool) -> Future[None]:
        """Replace the record of a run that has ended. One that is complete is never resumed, so values of its nodes
        go; its inputs stay, to explain it by."""

        def work(connection: Connection) -> None:
            connection.execute(_SAVE, {"this": run, "now": record})
            connection.execute(_END, {"this": run, "at_s": ended_s})
            if is_complete:
                connection.execute(_FORGET_TASKS, {"this": run})

        return self._database.write(work, tenant)

    def forget(self, tenant: str, run: str) -> bool:
        """Remove a run that has ended, or whose server is gone, with its results. Returns whether there is none now.
        Blocks until its rows are deleted too, as far as they can be now."""

        def work(connection: Connection) -> bool:
            found = connection.execute(_OWNER, {"this": run, "of_tenant": tenant}).one_or_none()
            if found is not None and found.server is not None and not self._is_gone(found.server):
                return False
            if found is not None:
                _forget(connection, run)
            return True

        is_gone = self._database.write(work, tenant).result()
        if is_gone:
            cleared: Future[None] = Future()
            self._clear(tenant, [run], cleared)
            cleared.result()
        return is_gone

    def forget_old(self, tenant: str, max_kept: int, since_s: float) -> Future[None]:
        """Remove the runs of a tenant that ended before `since_s`, and those beyond the last `max_kept`. The future is
        done when their rows are deleted too, as far as they can be now."""

        def work(connection: Connection) -> list[str]:
            ended = connection.execute(_OLD, {"of_tenant": tenant}).all()
            old = [run for place, (run, at_s) in enumerate(ended) if place >= max_kept or (at_s or 0.0) < since_s]
            for run in old:
                _forget(connection, run)
            return old

        def clear(forgotten: Future[list[str]]) -> None:
            error = forgotten.exception()
            if error is None:
                self._clear(tenant, forgotten.result(), cleared)
            else:
                cleared.set_exception(error)

        cleared: Future[None] = Future()
        self._database.write(work, tenant).add_done_callback(clear)
        return cleared

    # ---- rows

    def inputs(self, run: str, least: int) -> tuple[int, bytes] | None:
        """The first rows from number `least` on, with the number of the first of them. Blocks."""

        def work(connection: Connection) -> tuple[int, bytes] | None:
            found = connection.execute(_NEXT_INPUTS, {"this": run, "least": least}).one_or_none()
            return None if found is None else (found.first, found.rows)

        return self._database.read(work)

    def end_row(
        self, tenant: str, run: str, row: int, result: bytes, *, failed: bool, calls: bytes = b""
    ) -> Future[None]:
        """Keep the result of a row, and what is to be kept of its calls, instead of its nodes' values and the answers
        of its variables. Its number is the next of those that are kept, so that there is no gap. The future raises
        `QuotaExceeded` if the tenant's runs have no room for it."""

        def work(connection: Connection) -> None:
            size = len(result) + len(calls)
            self._take_room(connection, tenant, size, "delete some runs, then resume this one")
            connection.execute(_GROW, {"this": run, "more": size})
            connection.execute(_PUT_ROW, {"run": run, "row": row, "result": result})
            connection.execute(_PUT_ENDING, {"this": run, "this_row": row, "has_failed": int(failed)})
            connection.execute(_FORGET_ROW, {"this": run, "this_row": row})
            connection.execute(_FORGET_ANSWERS, {"this": run, "this_row": row})
            if calls:
                connection.execute(_PUT_TRACE, {"run": run, "row": row, "calls": calls})

        return self._database.write(work, tenant)

    def traces(self, run: str) -> list[tuple[int, bytes]]:
        """(row, what is kept of its calls), in the order of the rows. Blocks."""
        return self._database.read(
            lambda connection: [(row, calls) for row, calls in connection.execute(_TRACED, {"this": run})]
        )

    def endings(self, run: str) -> Endings:
        """Which rows of a run have ended. Blocks."""

        def work(connection: Connection) -> Endings:
            found = connection.execute(_ENDINGS, {"this": run}).all()
            last = max((each.number for each in found), default=0)
            return Endings(last, frozenset(each.row for each in found), sum(each.failed for each in found))

        return self._database.read(work)

    def num_ended(self, tenant: str, run: str) -> Future[tuple[int, int]]:
        """How many rows of a run have ended, and how many of them failed, once all earlier writes of the tenant are
        done."""

        def work(connection: Connection) -> tuple[int, int]:
            num_rows, num_failed = connection.execute(_NUM_ENDED, {"this": run}).one()
            return num_rows, num_failed

        return self._database.write(work, tenant)

    def results(self, run: str, after: int, limit: int, max_bytes: int) -> list[NumberedResult]:
        """Results with higher numbers than `after`, in their order: at most `limit`, and no further one once they have
        `max_bytes`. Blocks."""

        def work(connection: Connection) -> list[NumberedResult]:
            page, size = [], 0
            rows = connection.execute(_RESULTS.limit(limit), {"this": run, "after": after})
            for number, result in rows:
                page.append(NumberedResult(number, result))
                size += len(result)
                if size >= max_bytes:
                    break
            rows.close()
            return page

        return self._database.read(work)

    def _take_room(self, connection: Connection, tenant: str, size: int, advice: str) -> None:
        """Count bytes that are about to be written. Raises `QuotaExceeded`."""
        if size > self._room.get(tenant, 0):
            used = connection.execute(_SIZE, {"of_tenant": tenant}).scalar() or 0
            if used + size > self._max_bytes:
                raise QuotaExceeded(
                    f"Rows and results of your runs take {used:,} bytes, and {size:,} more would exceed "
                    f"{self._max_bytes:,} (workflows.max_run_bytes): {advice}."
                )
            self._room[tenant] = min(self._max_bytes - used, max(KNOWN_ROOM_BYTES, size))
        self._room[tenant] -= size

    def _clear(self, tenant: str, removed: Sequence[str], cleared: Future[None]) -> None:
        """Delete rows of removed runs, some in each write, so that other writes come between. Then `cleared` is done,
        also where the disk takes no write or the database is closed: `take_over` of the next server goes on."""
        if not removed:
            cleared.set_result(None)
            return

        def go_on(written: Future[bool]) -> None:
            if written.exception() is not None:
                cleared.set_result(None)
            else:
                self._clear(tenant, removed if written.result() else removed[1:], cleared)

        try:
            self._database.write(partial(_clear_some, removed[0]), tenant).add_done_callback(go_on)
        except StorageFailed:
            cleared.set_result(None)

    def _one(self, query: Select[Any], values: dict[str, str]) -> StoredRun | None:
        def work(connection: Connection) -> StoredRun | None:
            found = connection.execute(query, values).one_or_none()
            return None if found is None else StoredRun(*found)

        return self._database.read(work)

    def _is_gone(self, server: str) -> bool:
        """Whether the server that carried a run out has ended; of a database in memory it is this one."""
        servers = self._database.server
        return servers is not None and servers.is_gone(server)

    @property
    def _server(self) -> str:
        """The name of this server; one of a database in memory has no other beside it."""
        return self._database.server.name if self._database.server is not None else "this"


def _forget(connection: Connection, run: str) -> None:
    """Remove a run for all readers."""
    connection.execute(_FORGET, {"this": run})
    connection.execute(_LEAVE, {"this": run})


def _clear_some(run: str, connection: Connection) -> bool:
    """Delete some rows of a run, if it was removed. Returns whether more may be left."""
    if connection.execute(_IS_LEFT, {"this": run}).scalar() is None:
        return False
    room = CLEARED_ROWS
    for statement in _CLEAR:
        room -= connection.execute(statement, {"this": run, "most": room}).rowcount
        if room <= 0:
            return True
    connection.execute(_CLEARED, {"this": run})
    return False
