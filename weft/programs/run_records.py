"""`RunRecords`: the records of runs in a file, so that a server which was started again still knows them.

Owns one SQLite file (WAL; `flush` returns when everything told before is durable), and which server a run that has not
ended belongs to. A record is no message, result or log: those stay in memory. `weft.programs.history.History` says what
is kept and for how long, and tells this what it added, ended and forgot; writes follow on a thread, many in one
transaction, so that launching waits for no disk.

A server holds a lock on a file of its own beside the database for as long as it lives. Runs of a server whose lock is
free were under way when it ended: whoever finds them first, in one transaction, writes down that they failed. Several
servers may share the file: each adds and forgets its own, and sees of the others what there was when it started.

Where the disk is full or cannot be written, nothing else notices: a warning is logged once, what could not be written
is kept in memory, and written with the next record that can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from weft.abi.errors import HostDead
from weft.core.wire import ErrorRecord
from weft.programs.database import open_database, writing
from weft.programs.run.runs import RunRecord

MAX_UNWRITTEN = 20_000
"""Changes that wait for a disk that takes none; the oldest go first."""
_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS program_runs (
    id TEXT PRIMARY KEY,
    owner TEXT,
    created_s REAL NOT NULL,
    record BLOB NOT NULL
) WITHOUT ROWID
"""
_PUT = "INSERT INTO program_runs VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET owner = ?2, record = ?4"
_DELETE = "DELETE FROM program_runs WHERE id = ?"
_ALIVE = "SELECT owner, record FROM program_runs WHERE owner IS NOT NULL"
_ENDED = "SELECT id, record FROM program_runs WHERE owner IS NULL ORDER BY created_s, id"
LOST = HostDead("the server ended before this run did; start it again")
"""Error of a run whose server ended before it could report a result."""

logger = logging.getLogger("weft.programs")


class Journal(Protocol):
    """Receives the changes of `History`."""

    def began(self, record: RunRecord) -> None:
        """Record that a run was added."""

    def ended(self, record: RunRecord) -> None:
        """A run has ended; the record is final."""

    def forgotten(self, run_ids: Iterable[str]) -> None:
        """These are remembered no longer."""


class RunRecords:
    """Implements `Journal`. See the module's docstring. Used from one event loop, and by its thread."""

    def __init__(self, path: Path):
        """The file, and the folder it is in, are made when they are first needed."""
        self._path = path
        self._owner = secrets.token_hex(8)
        self._lock_file: int | None = None
        self._database: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-runs")
        self._guard = threading.Lock()
        self._unwritten: dict[str, RunRecord | None] = {}
        """By run: its latest record, or None where it was forgotten. Guarded, as the following."""
        self._writing: Future[None] | None = None
        self._warned = False
        self._closed = False

    def load(self) -> list[RunRecord]:
        """Runs that are over, oldest first; first of all, those become so that a server which is gone had left. Blocks.

        What cannot be read is logged and left as it is; then there is nothing from before.
        """
        try:
            if not self._path.exists():
                return []
            database = self._open()
            with writing(database):
                self._end_lost(database)
                rows = database.execute(_ENDED).fetchall()
        except (sqlite3.Error, OSError) as error:
            logger.warning("runs from before cannot be read from %s: %s", self._path, error)
            self._drop_database()
            return []
        return [record for _, data in rows if (record := self._decoded(data)) is not None]

    def began(self, record: RunRecord) -> None:
        """Write the record of a new run. Durable shortly, or when `flush` has returned."""
        self._change({record.id: record})

    def ended(self, record: RunRecord) -> None:
        """Write the final record of a run."""
        self._change({record.id: record})

    def forgotten(self, run_ids: Iterable[str]) -> None:
        """Remove the records of these runs."""
        self._change(dict.fromkeys(run_ids))

    async def flush(self) -> None:
        """Wait until what was told before is durable, or could not be written."""
        with self._guard:
            writing = self._writing
        if writing is not None:
            await asyncio.wrap_future(writing)

    async def close(self) -> None:
        """Write what is left, once more where that failed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    # ---- on the loop

    def _change(self, changes: dict[str, RunRecord | None]) -> None:
        if self._closed or not changes:
            return
        with self._guard:
            for run_id, record in changes.items():
                # The latest is the newest: what is dropped where too much waits is what was changed longest ago.
                self._unwritten.pop(run_id, None)
                self._unwritten[run_id] = record
            while len(self._unwritten) > MAX_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]
            if self._writing is None or self._writing.done():
                self._writing = self._thread.submit(self._write)

    # ---- on the thread

    def _write(self) -> None:
        while True:
            with self._guard:
                changes, self._unwritten = self._unwritten, {}
                if not changes:
                    self._writing = None
                    return
            try:
                self._put(changes)
            except (sqlite3.Error, OSError) as error:
                self._failed(error, changes)
                return
            if self._warned:
                logger.warning("records of runs are kept again in %s", self._path)
                self._warned = False

    def _put(self, changes: dict[str, RunRecord | None]) -> None:
        database = self._open()
        with writing(database):
            for run_id, record in changes.items():
                if record is None:
                    database.execute(_DELETE, (run_id,))
                else:
                    self._put_one(database, record)

    def _put_one(self, database: sqlite3.Connection, record: RunRecord) -> None:
        owner = None if record.ended else self._owner
        database.execute(_PUT, (record.id, owner, record.created_s, msgspec.json.encode(record)))

    def _failed(self, error: Exception, changes: dict[str, RunRecord | None]) -> None:
        self._drop_database()
        with self._guard:
            self._unwritten = {**changes, **self._unwritten}
            self._writing = None
        if not self._warned:
            self._warned = True
            logger.warning(
                "records of runs cannot be kept in %s and would be lost with this process: %s; see that its disk has "
                "room and may be written",
                self._path,
                error,
            )

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._hold_lock()
            database = open_database(self._path, _SCHEMA)
            [[version]] = database.execute("PRAGMA user_version").fetchall()
            if version not in (0, _FORMAT):
                database.close()
                raise sqlite3.DatabaseError(f"it is of format {version}, and this is for {_FORMAT}")
            if not version:
                database.execute(f"PRAGMA user_version = {_FORMAT}")
            self._database = database
        return self._database

    def _drop_database(self) -> None:
        """Close the connection; the next use opens a new one."""
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _close(self) -> None:
        self._write()
        self._drop_database()
        if self._lock_file is not None:
            self._lock_path(self._owner).unlink(missing_ok=True)
            os.close(self._lock_file)
            self._lock_file = None

    # ---- whose runs are whose

    def _end_lost(self, database: sqlite3.Connection) -> None:
        """Runs that their server cannot end any more have failed."""
        alive = database.execute(_ALIVE).fetchall()
        gone = {owner for owner in {owner for owner, _ in alive} if self._is_gone(owner)}
        for owner, data in alive:
            record = self._decoded(data) if owner in gone else None
            if record is not None:
                lost = msgspec.structs.replace(
                    record, status="failed", error=ErrorRecord.of(LOST), finished_s=time.time()
                )
                self._put_one(database, lost)
        for path in self._path.parent.glob(f"{self._path.name}.*.lock"):
            if self._is_gone(path.name.split(".")[-2]):
                path.unlink(missing_ok=True)

    def _hold_lock(self) -> None:
        path = self._lock_path(self._owner)
        while self._lock_file is None:
            number = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Another server that looks whether we are gone has it for a moment, and may have removed the file.
                fcntl.flock(number, fcntl.LOCK_EX)
                if path.exists() and path.stat().st_ino == os.fstat(number).st_ino:
                    self._lock_file = number
            finally:
                if self._lock_file is None:
                    os.close(number)

    def _is_gone(self, owner: str) -> bool:
        """Whether the lock of that server is free: the system releases it when the process ends."""
        if owner == self._owner:
            return False
        try:
            number = os.open(self._lock_path(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(number)
        return True

    def _lock_path(self, owner: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{owner}.lock")

    def _decoded(self, data: bytes) -> RunRecord | None:
        try:
            return msgspec.json.decode(data, type=RunRecord)
        except msgspec.MsgspecError as error:
            logger.warning("a record of a run in %s cannot be read: %s", self._path, error)
            return None
