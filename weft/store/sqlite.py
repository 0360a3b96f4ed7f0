"""The SQLite dialect: opening connections, upserts, and the causes of the database's errors.

Code that only SQLite understands is here; the other modules use portable SQLAlchemy Core.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BindParameter,
    ColumnClause,
    Connection,
    Delete,
    Engine,
    Table,
    create_engine,
    delete,
    event,
    literal_column,
    select,
)
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

BUSY_S = 10.0
"""How long a transaction waits for that of another process."""
_PAUSE_S = 0.02
_RETRY_S = 0.0005
"""Time between attempts to begin a transaction that writes: less than `YIELD_S`, so that a process that waits begins in
the pause of another one. SQLite's own attempts are up to 0.1 s apart."""
YIELD_S = 0.001
"""Pause of a process between transactions if writes wait already. Without it, other processes hardly find a moment in
which no transaction is in progress."""
_READERS = 8
"""Connections that are kept open; more are opened while more threads read."""
_NO_ACCESS = "it cannot be opened; check that {place} is a writable directory"
_FULL = "the disk is full; free space in {place}"
_DAMAGED = "its file is damaged; restore {place} from a copy, or name another folder"
_BUSY = "another server has been writing for too long; try again"
_CAUSES = {
    "FULL": _FULL,
    # A file system without room for the index of the write-ahead log, which a new connection makes.
    "IOERR_SHMSIZE": _FULL,
    "READONLY": _NO_ACCESS,
    "CANTOPEN": _NO_ACCESS,
    "CORRUPT": _DAMAGED,
    "NOTADB": _DAMAGED,
    "BUSY": _BUSY,
    "LOCKED": _BUSY,
}


def open_engine(path: Path | None) -> Engine:
    """Connections to the file, which is made where it is missing; None: one connection to a database in memory.

    A transaction of `engine.begin()` reads; one of `writing` excludes other writers. Every commit is durable.
    """
    if path is None:
        engine = create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}, hide_parameters=True
        )
    else:
        # Only this user may read tenants' data; SQLite gives its other files the mode of this one.
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))
        engine = create_engine(
            URL.create("sqlite", database=str(path)),
            poolclass=QueuePool,
            pool_size=_READERS,
            max_overflow=-1,
            hide_parameters=True,
            connect_args={"check_same_thread": False, "timeout": BUSY_S},
        )
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction in which no other process writes, from its first read on. All of it is committed, or nothing."""
    with engine.connect().execution_options(weft_writes=True) as connection, connection.begin():
        yield connection


def upsert(table: Table) -> Insert:
    """Insert a row, or replace all other columns of the one with the same primary key."""
    statement = insert(table)
    changed = {column.name: statement.excluded[column.name] for column in table.columns if not column.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed)


def delete_some(table: Table, run: BindParameter[str], most: BindParameter[int]) -> Delete:
    """Delete at most so many rows of a run from a table."""
    rowid: ColumnClause[int] = literal_column("rowid")
    found = table.alias()
    return delete(table).where(rowid.in_(select(rowid).select_from(found).where(found.c.run == run).limit(most)))


def cause_of(error: DBAPIError | OSError, place: str) -> str:
    """The cause and its remedy: no statement, no values, no path. `place` names the folder, as its reader knows it."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _FULL.format(place=place)
        return f"{error.strerror}; check that {place} is a writable directory"
    cause = _known_cause(error)
    if cause is None:
        return f"{error.orig}; check that the disk has room and is writable ({place})"
    return cause.format(place=place)


def _known_cause(error: DBAPIError) -> str | None:
    code = getattr(error.orig, "sqlite_errorname", None) or ""
    detailed = code.removeprefix("SQLITE_")
    return _CAUSES.get(detailed) or _CAUSES.get(detailed.partition("_")[0])


def _configure(connection: Any, _: object) -> None:
    # Transactions are begun by `_begin` alone.
    connection.isolation_level = None
    give_up_s = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except Exception as error:
            # SQLite does not wait for another process that is changing the file's mode, which each does at first.
            busy = getattr(error, "sqlite_errorname", None) == "SQLITE_BUSY"
            if not busy or time.monotonic() > give_up_s:
                raise
            time.sleep(_PAUSE_S)
    # In WAL mode anything less may lose what was committed when the machine loses power.
    connection.execute("PRAGMA synchronous = FULL")


def _begin(connection: Connection) -> None:
    if not connection.get_execution_options().get("weft_writes"):
        connection.exec_driver_sql("BEGIN")
        return
    cursor = connection.connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 0")
    give_up_s = time.monotonic() + BUSY_S
    try:
        while refusal := _try_to_begin(cursor):
            if not refusal.startswith("SQLITE_BUSY") or time.monotonic() >= give_up_s:
                connection.exec_driver_sql("BEGIN IMMEDIATE")  # Raises the error as one of SQLAlchemy.
                break
            time.sleep(_RETRY_S)
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")


def _try_to_begin(cursor: Any) -> str:
    """Begin a transaction that writes, without waiting. Returns the name of the error, empty if it has begun."""
    try:
        cursor.execute("BEGIN IMMEDIATE")
    except Exception as error:  # of the driver
        return getattr(error, "sqlite_errorname", "unknown")
    return ""
