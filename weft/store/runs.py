"""Rows of runs: an opaque record, and the server that executes the run until it has ended.

Owns the runs of servers that were killed: the first server that finds them ends them, once.
`weft.programs.run_records.RunRecords` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, delete, select, update

from weft.store.database import Database
from weft.store.schema import runs
from weft.store.sqlite import upsert

_PUT = upsert(runs)
_DELETE = delete(runs).where(runs.c.id == bindparam("run"))
_ALIVE = select(runs.c.id, runs.c.server, runs.c.record).where(runs.c.server.is_not(None))
_ENDED = select(runs.c.record).where(runs.c.server.is_(None)).order_by(runs.c.created_s, runs.c.id)


class RunRow(NamedTuple):
    """The encoded record of a run."""

    created_s: float
    ended: bool
    record: bytes


class RunTable:
    """The runs of a database. Every method raises `StorageFailed`."""

    def __init__(self, database: Database):
        self._database = database

    def save(self, changes: Mapping[str, RunRow | None]) -> Future[None]:
        """Write the rows of runs by id, in one transaction; None deletes one. Runs that have not ended belong to this
        server."""

        def work(connection: Connection) -> None:
            server = self._database.server and self._database.server.name
            kept = [
                {"id": id, "server": None if row.ended else server, "created_s": row.created_s, "record": row.record}
                for id, row in changes.items()
                if row is not None
            ]
            removed = [{"run": id} for id, row in changes.items() if row is None]
            if kept:
                connection.execute(_PUT, kept)
            if removed:
                connection.execute(_DELETE, removed)

        return self._database.write(work)

    def load(self, lost: Callable[[bytes], bytes | None]) -> list[bytes]:
        """Records of ended runs, oldest first. `lost` converts the record of a run whose server is gone to its final
        one; None leaves the run as it is. Blocks."""
        server = self._database.server
        if server is None or not self._database.exists():
            return []

        def work(connection: Connection) -> list[bytes]:
            for id, owner, record in connection.execute(_ALIVE).all():
                ended = lost(record) if server.is_gone(owner) else None
                if ended is not None:
                    connection.execute(update(runs).where(runs.c.id == id).values(server=None, record=ended))
            return list(connection.execute(_ENDED).scalars())

        return self._database.write(work).result()
