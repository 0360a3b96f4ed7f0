"""`RunRecords`: the records of runs in the store, so that a server which was started again still knows them.

A record is no message, result or log: those stay in memory. `weft.programs.history.History` says what is kept and for
how long, and tells this what it added, ended and forgot; writes follow on the database's thread, many in one
transaction, so that launching waits for no disk. Several servers may share the database: each adds and forgets its own,
and sees of the others what there was when it started. `weft.store.runs` knows whose runs are whose.

Where the disk is full or cannot be written, nothing else notices: what could not be written is kept in memory, and
written with the next record that can be.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

import msgspec

from weft.abi.errors import HostDead, StorageFailed
from weft.core.wire import ErrorRecord
from weft.programs.run.runs import RunRecord
from weft.store.database import Database
from weft.store.runs import RunRow, RunTable

MAX_UNWRITTEN = 20_000
"""Changes that wait for a disk that takes none; the oldest go first."""
LOST = HostDead("the server ended before this run did; start it again")
"""Error of a run whose server ended before it could report a result."""

logger = logging.getLogger("weft.programs")


class RunRecords:
    """Writes the changes of `History` to the database. Used from one event loop, and by the database's thread."""

    def __init__(self, database: Database):
        """The database is closed with this."""
        self._database = database
        self._table = RunTable(database)
        self._guard = threading.RLock()
        self._unwritten: dict[str, RunRecord | None] = {}
        """By run: its latest record, or None where it was forgotten. Guarded, as the following."""
        self._writing: Future[None] | None = None
        self._closed = False

    def load(self) -> list[RunRecord]:
        """Runs that have ended, oldest first; those of servers that were killed are ended by this call. Blocks.

        Records that cannot be read are logged, stay as they are, and are left out.
        """
        try:
            found = self._table.load(_lost)
        except StorageFailed as error:
            logger.warning("runs from before cannot be read: %s", error.message)
            return []
        return [record for data in found if (record := _decoded(data)) is not None]

    def began(self, record: RunRecord) -> None:
        """Write the record of a new run. Durable shortly, or when `flush` has returned."""
        self._change({record.id: record})

    def ended(self, record: RunRecord) -> None:
        """Write the final record of a run that has ended."""
        self._change({record.id: record})

    def forgotten(self, run_ids: Iterable[str]) -> None:
        """Remove the records of these runs, which are remembered no longer."""
        self._change(dict.fromkeys(run_ids))

    async def flush(self) -> None:
        """Wait until what was told before is durable, or could not be written."""
        while (writing := self._writing) is not None:
            await asyncio.gather(asyncio.wrap_future(writing), return_exceptions=True)

    async def close(self) -> None:
        """Write what is left, once more where that failed. Idempotent."""
        if not self._closed:
            self._closed = True
            await self.flush()
            with self._guard:
                self._write()
            await self.flush()
            await asyncio.to_thread(self._database.close)

    # ---- inside

    def _change(self, changes: dict[str, RunRecord | None]) -> None:
        if self._closed:
            return
        with self._guard:
            for run_id, record in changes.items():
                # The latest is the newest: what is dropped where too much waits is what was changed longest ago.
                self._unwritten.pop(run_id, None)
                self._unwritten[run_id] = record
            while len(self._unwritten) > MAX_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]
            self._write()

    def _write(self) -> None:
        """Guarded: write what waits, unless that is under way."""
        if self._writing is None and self._unwritten:
            changes, self._unwritten = self._unwritten, {}
            rows = {run_id: None if record is None else _row(record) for run_id, record in changes.items()}
            self._writing = self._table.save(rows)
            self._writing.add_done_callback(partial(self._written, changes))

    def _written(self, changes: dict[str, RunRecord | None], writing: Future[None]) -> None:
        """On the database's thread."""
        with self._guard:
            self._writing = None
            if writing.cancelled() or writing.exception() is not None:
                self._unwritten = {**changes, **self._unwritten}
            else:
                self._write()


def _row(record: RunRecord) -> RunRow:
    return RunRow(record.created_s, record.ended, msgspec.json.encode(record))


def _lost(data: bytes) -> bytes | None:
    """The record of a run that its server cannot end any more."""
    record = _decoded(data)
    if record is None:
        return None
    failure = ErrorRecord.of(LOST)
    return msgspec.json.encode(msgspec.structs.replace(record, status="failed", error=failure, finished_s=time.time()))


def _decoded(data: bytes) -> RunRecord | None:
    try:
        return msgspec.json.decode(data, type=RunRecord)
    except msgspec.MsgspecError as error:
        logger.warning("a record of a run cannot be read: %s", error)
        return None
