"""`RunRecords`: the records of runs in the store, so that a server which was started again still knows them.

A record is no message, result or log: those stay in memory. `weft.programs.history.History` says what is kept and for
how long, and tells this what it added, ended and forgot; writes follow on the database's thread, many in one
transaction, so that launching waits for no disk. Several servers may share the database: each adds and forgets its own,
and sees of the others what there was when it started. `weft.store.runs` knows whose runs are whose.

Where the disk is full or cannot be written, nothing else notices: what could not be written is kept in memory, encoded,
and is tried again with a later change.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import islice

import msgspec

from weft.abi.errors import HostDead, StorageFailed
from weft.core.wire import ErrorRecord
from weft.programs.run.runs import RunRecord
from weft.store.database import Database
from weft.store.runs import RunRow, RunTable

MAX_UNWRITTEN = 20_000
"""Changes that wait for a disk that takes none; the oldest go first."""
MAX_WRITE = 500
"""Changes of one transaction, so that one that fails costs little."""
RETRY_S = 1.0
"""Time after a write that failed in which no other is tried."""
_DROPPED = object()
LOST = HostDead("the server ended before this run did; start it again")
"""Error of a run whose server ended before it could report a result."""

logger = logging.getLogger("weft.programs")


class RunRecords:
    """Writes the changes of `History` to the database. Used from one event loop, and by the database's thread."""

    def __init__(self, database: Database, now: Callable[[], float] = time.monotonic):
        """The database is closed with this. `now` is a clock in seconds."""
        self._database = database
        self._now = now
        self._table = RunTable(database)
        self._guard = threading.RLock()
        self._unwritten: dict[str, RunRow | None] = {}
        """By run: its latest record, encoded once, or None where it was forgotten. A change stays until it is durable.
        Guarded, as the following."""
        self._writing: Future[None] | None = None
        self._failed_s: float | None = None
        """When the last write failed; None if it did not."""
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

    def _change(self, changes: Mapping[str, RunRecord | None]) -> None:
        if self._closed:
            return
        rows = {run_id: None if record is None else _row(record) for run_id, record in changes.items()}
        with self._guard:
            for run_id, row in rows.items():
                # The latest is the newest: what is dropped where too much waits is what was changed longest ago.
                self._unwritten.pop(run_id, None)
                self._unwritten[run_id] = row
            while len(self._unwritten) > MAX_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]
            if self._failed_s is None or self._now() - self._failed_s >= RETRY_S:
                self._write()

    def _write(self) -> None:
        """Guarded: write the oldest of the changes that wait, unless a write is under way."""
        if self._writing is None and self._unwritten:
            rows = dict(islice(self._unwritten.items(), MAX_WRITE))
            try:
                self._writing = self._table.save(rows)
            except StorageFailed:
                self._failed_s = self._now()
            else:
                self._writing.add_done_callback(partial(self._written, rows))

    def _written(self, rows: Mapping[str, RunRow | None], writing: Future[None]) -> None:
        """On the database's thread."""
        with self._guard:
            self._writing = None
            if writing.cancelled() or writing.exception() is not None:
                self._failed_s = self._now()
                return
            self._failed_s = None
            for run_id, row in rows.items():
                # Meanwhile the run may have had a later change, or this one been dropped.
                if self._unwritten.get(run_id, _DROPPED) is row:
                    del self._unwritten[run_id]
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
