"""Small values by name, one set for each tenant: what `Context.save` and programs' own state are kept in.

Owns names, the quota of each tenant, and where values are: one SQLite file (WAL, every write durable when it was
awaited), or memory. Several servers may share the file, and a tenant has one quota in it. It knows nothing of programs.
Sessions call it; built by the program host.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from weft.abi.errors import InvalidRequest, QuotaExceeded, StorageFailed
from weft.programs.database import open_database, writing
from weft.programs.disk import storage_failed
from weft.threads import FairThreads

T = TypeVar("T")

DEFAULT_QUOTA_BYTES = 64 << 20
"""Of a tenant: names and values."""
MAX_NAME_BYTES = 512
_SCHEMA = """
CREATE TABLE IF NOT EXISTS program_values (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID
"""
_SIZE = "SELECT COALESCE(SUM(LENGTH(CAST(name AS BLOB)) + LENGTH(value)), 0) FROM program_values WHERE tenant = ?"
_PUT = "INSERT INTO program_values VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
_GET = "SELECT value FROM program_values WHERE tenant = ? AND name = ?"
_DELETE = "DELETE FROM program_values WHERE tenant = ? AND name = ?"
_NAMES = "SELECT name FROM program_values WHERE tenant = ? AND name >= ? ORDER BY name"


class Store(Protocol):
    """Values by tenant and name. Calls are carried out in the order in which they were made."""

    async def put(self, tenant: str, name: str, value: bytes) -> None:
        """Keep a value instead of the one there was. Raises `QuotaExceeded` or `StorageFailed`; then the old stays."""

    async def get(self, tenant: str, name: str) -> bytes | None:
        """The value; None where there is none."""

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a name. Does nothing for one that is not there."""

    async def names(self, tenant: str, prefix: str) -> list[str]:
        """Names that begin so, in the order of their code points."""

    async def close(self) -> None:
        """Close the store. Idempotent."""


def check_name(name: str) -> str:
    """The name. Raises `InvalidRequest` for one that cannot be."""
    if not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"a name has 1 to {MAX_NAME_BYTES} bytes", "name")
    if not name.isprintable():
        raise InvalidRequest("a name has printable characters alone", "name")
    return name


class MemoryStore:
    """For tests, and where nothing is to outlive the process."""

    def __init__(self, quota_bytes: int = DEFAULT_QUOTA_BYTES):
        self._quota = quota_bytes
        self._values: dict[str, dict[str, bytes]] = {}

    async def put(self, tenant: str, name: str, value: bytes) -> None:
        """Store a value under a name, replacing an earlier one."""
        values = self._values.setdefault(tenant, {})
        others = sum(_size(key, old) for key, old in values.items() if key != name)
        _check_quota(others + _size(check_name(name), value), self._quota)
        values[name] = value

    async def get(self, tenant: str, name: str) -> bytes | None:
        """The value of a name; None where there is none."""
        return self._values.get(tenant, {}).get(name)

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a name; unknown names are ignored."""
        self._values.get(tenant, {}).pop(name, None)

    async def names(self, tenant: str, prefix: str) -> list[str]:
        """Sorted names with a prefix."""
        return sorted(name for name in self._values.get(tenant, {}) if name.startswith(prefix))

    async def close(self) -> None:
        """Close the store. Idempotent."""


class SqliteStore:
    """Values in a file, read and written on one thread, which tenants share fairly."""

    def __init__(self, path: Path, quota_bytes: int = DEFAULT_QUOTA_BYTES):
        """The file, and the folder it is in, are made when they are first needed."""
        self._path = path
        self._quota = quota_bytes
        self._sizes: dict[str, int] = {}
        self._version = -1
        """SQLite's number of the state that sizes are of: it changes with what other connections write."""
        self._thread = FairThreads(1, per_tenant=1, name="weft-store")
        self._under_way: set[asyncio.Future[Any]] = set()
        self._database: sqlite3.Connection | None = None
        self._closed = False

    async def put(self, tenant: str, name: str, value: bytes) -> None:
        """Keep a value; durable once this has returned."""
        await self._run(partial(self._put, tenant, check_name(name), value), tenant)

    async def get(self, tenant: str, name: str) -> bytes | None:
        """The value of a name; None where there is none."""
        return await self._run(partial(self._get, tenant, name), tenant)

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a name; durable once this has returned."""
        await self._run(partial(self._delete, tenant, name), tenant)

    async def names(self, tenant: str, prefix: str) -> list[str]:
        """Sorted names with a prefix."""
        return await self._run(partial(self._names, tenant, prefix), tenant)

    async def close(self) -> None:
        """What was asked for is done first."""
        if not self._closed:
            self._closed = True
            if self._under_way:
                await asyncio.wait(self._under_way)
            await self._thread.run(self._close)
            self._thread.close()

    # ---- on the thread

    def _put(self, tenant: str, name: str, value: bytes) -> None:
        database = self._open()
        with writing(database):
            old = database.execute(_GET, (tenant, name)).fetchone()
            size = self._size(tenant) + _size(name, value) - (0 if old is None else _size(name, old[0]))
            _check_quota(size, self._quota)
            database.execute(_PUT, (tenant, name, value))
        self._sizes[tenant] = size

    def _get(self, tenant: str, name: str) -> bytes | None:
        row = self._open().execute(_GET, (tenant, name)).fetchone()
        return None if row is None else bytes(row[0])

    def _delete(self, tenant: str, name: str) -> None:
        database = self._open()
        with writing(database):
            old = database.execute(_GET, (tenant, name)).fetchone()
            if old is None:
                return
            size = self._size(tenant) - _size(name, old[0])
            database.execute(_DELETE, (tenant, name))
        self._sizes[tenant] = size

    def _names(self, tenant: str, prefix: str) -> list[str]:
        found = []
        # Names are ordered by bytes, so those with a prefix stand together, from the prefix on.
        for (name,) in self._open().execute(_NAMES, (tenant, prefix)):
            if not name.startswith(prefix):
                break
            found.append(name)
        return found

    def _size(self, tenant: str) -> int:
        """Bytes that a tenant has stored; counted once, and kept up from then on, unless somebody else has written."""
        [version] = self._open().execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            self._sizes.clear()
        if tenant not in self._sizes:
            self._sizes[tenant] = int(self._open().execute(_SIZE, (tenant,)).fetchone()[0])
        return self._sizes[tenant]

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = open_database(self._path, _SCHEMA)
        return self._database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    async def _run(self, work: Callable[[], T], tenant: str = "") -> T:
        if self._closed:
            raise StorageFailed("the store of values is closed: the server is shutting down")
        job = asyncio.wrap_future(self._thread.submit(work, tenant=tenant))
        self._under_way.add(job)
        job.add_done_callback(self._under_way.discard)
        try:
            return await job
        except (sqlite3.Error, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise storage_failed(
                f"values cannot be kept: {reason}; see that the disk has room and may be written (programs.data_dir)",
                self._path,
            ) from error


def _size(name: str, value: bytes) -> int:
    return len(name.encode()) + len(value)


def _check_quota(size: int, quota: int) -> None:
    if size > quota:
        raise QuotaExceeded(
            f"this tenant would store {size} bytes; it may store {quota}. Delete some values first", "value"
        )
