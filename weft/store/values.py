"""Small values by name, one set for each tenant: what `Context.save` and programs' own state are kept in.

Owns names, the quota of each tenant, and the order of its calls. Large values are blobs. Servers that share a folder
share each tenant's quota. Sessions of programs call it; the program host builds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, bindparam, delete, select

from weft.abi.errors import InvalidRequest, QuotaExceeded, StorageFailed
from weft.store.database import Database
from weft.store.schema import program_values, value_usage
from weft.store.sqlite import upsert
from weft.threads import FairThreads

T = TypeVar("T")

DEFAULT_QUOTA_BYTES = 64 << 20
"""Of a tenant: names and values."""
MAX_NAME_BYTES = 512
INLINE_BYTES = 64 << 10
"""Larger values are blobs."""
_THREADS = 2
_Kind = Literal["read", "write", "blob"]
_row = program_values.c
_THIS = (_row.tenant == bindparam("of_tenant"), _row.name == bindparam("of_name"))
_FIND = select(_row.size_bytes, _row.value, _row.blob).where(*_THIS)
_DELETE = delete(program_values).where(*_THIS)
_PUT = upsert(program_values)
_NAMES = (
    select(_row.name).where(_row.tenant == bindparam("of_tenant"), _row.name >= bindparam("prefix")).order_by(_row.name)
)
_USED = select(value_usage.c.size_bytes).where(value_usage.c.tenant == bindparam("of_tenant"))
_USE = upsert(value_usage)


class ValueStore(Protocol):
    """Values by tenant and name. Calls of a tenant are carried out in the order in which they were made."""

    async def put(self, tenant: str, name: str, value: bytes) -> None:
        """Keep a value instead of the one there was. Raises `QuotaExceeded` or `StorageFailed`; then the old stays."""

    async def get(self, tenant: str, name: str) -> bytes | None:
        """The value; None where there is none."""

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a name. Does nothing for one that is not there."""

    async def names(self, tenant: str, prefix: str) -> list[str]:
        """Names that begin so, in the order of their code points."""

    async def close(self) -> None:
        """Finish the calls that were made and release what the store holds. Idempotent."""


def check_name(name: str) -> str:
    """The name. Raises `InvalidRequest` for one that cannot be."""
    if not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"a name must have 1 to {MAX_NAME_BYTES} bytes", "name")
    if not name.isprintable():
        raise InvalidRequest("a name may only have printable characters", "name")
    return name


class MemoryValueStore:
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
        """Do nothing: memory needs no release."""


class DatabaseValueStore:
    """Values in a database, which is closed with this. Used from one event loop."""

    def __init__(self, database: Database, quota_bytes: int = DEFAULT_QUOTA_BYTES):
        self._database = database
        self._quota = quota_bytes
        self._threads = FairThreads(_THREADS, per_tenant=1, name="weft-values")
        self._calls: dict[str, _TenantCalls] = {}
        self._closed = False

    async def put(self, tenant: str, name: str, value: bytes) -> None:
        """Keep a value; durable once this has returned."""
        size = _size(check_name(name), value)
        if len(value) <= INLINE_BYTES:
            await self._write(tenant, lambda connection: self._put(tenant, name, size, value, connection, None))
        else:
            work = partial(self._put, tenant, name, size, None)
            put = partial(self._database.write_blob, value, work, tenant)
            await self._run(tenant, "blob", lambda: self._threads.submit(put, tenant=tenant))

    async def get(self, tenant: str, name: str) -> bytes | None:
        """The value of a name; None where there is none."""
        return await self._read(tenant, partial(self._get, tenant, name))

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a name; durable once this has returned."""
        await self._write(tenant, partial(self._delete, tenant, name))

    async def names(self, tenant: str, prefix: str) -> list[str]:
        """Sorted names with a prefix."""
        return await self._read(tenant, partial(self._database.read, partial(_names, tenant, prefix)))

    async def close(self) -> None:
        """Finish the calls that were made, then close the database. Idempotent."""
        if not self._closed:
            self._closed = True
            while jobs := [job for calls in self._calls.values() for job in calls.running]:
                await asyncio.wait(jobs)
            self._threads.close()
            await asyncio.to_thread(self._database.close)

    # ---- inside

    async def _write(self, tenant: str, work: Callable[[Connection], tuple[None, list[str]]]) -> None:
        def start() -> Future[Any]:
            written = self._database.write(work, tenant)
            written.add_done_callback(self._remove_replaced)
            return written

        await self._run(tenant, "write", start)

    async def _read(self, tenant: str, work: Callable[[], T]) -> T:
        found: T = await self._run(tenant, "read", lambda: self._threads.submit(work, tenant=tenant))
        return found

    async def _run(self, tenant: str, kind: _Kind, start: Callable[[], Future[Any]]) -> Any:
        if self._closed:
            raise StorageFailed("the server is shutting down and stores nothing more")
        calls = self._calls.get(tenant)
        if calls is None:
            calls = self._calls[tenant] = _TenantCalls(partial(self._calls.pop, tenant))
        return await calls.add(kind, start)

    def _remove_replaced(self, written: Future[tuple[None, list[str]]]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._database.remove_blobs(written.result()[1])

    # ---- on threads

    def _put(
        self, tenant: str, name: str, size: int, value: bytes | None, connection: Connection, blob: str | None
    ) -> tuple[None, list[str]]:
        old = connection.execute(_FIND, {"of_tenant": tenant, "of_name": name}).first()
        used = _used(connection, tenant) + size - (0 if old is None else old.size_bytes)
        _check_quota(used, self._quota)
        row = {"tenant": tenant, "name": name, "size_bytes": size, "value": value, "blob": blob}
        connection.execute(_PUT, row)
        connection.execute(_USE, {"tenant": tenant, "size_bytes": used})
        return None, [] if old is None or old.blob is None else [old.blob]

    def _get(self, tenant: str, name: str) -> bytes | None:
        def find(connection: Connection) -> bytes | str | None:
            found = connection.execute(_FIND, {"of_tenant": tenant, "of_name": name}).first()
            return None if found is None else found.value if found.blob is None else found.blob

        try:
            return self._database.read_blob(find)
        except FileNotFoundError:
            raise StorageFailed(f"the value {name!r} has lost its content; put it again") from None

    @staticmethod
    def _delete(tenant: str, name: str, connection: Connection) -> tuple[None, list[str]]:
        this = {"of_tenant": tenant, "of_name": name}
        old = connection.execute(_FIND, this).first()
        if old is None:
            return None, []
        connection.execute(_DELETE, this)
        connection.execute(_USE, {"tenant": tenant, "size_bytes": _used(connection, tenant) - old.size_bytes})
        return None, [] if old.blob is None else [old.blob]


class _Call(NamedTuple):
    kind: _Kind
    start: Callable[[], Future[Any]]
    outcome: asyncio.Future[Any]


class _TenantCalls:
    """Calls of one tenant in their order: neighbours of one kind run together, so that writes share a commit; a call of
    another kind begins after all calls before it have ended."""

    def __init__(self, idle: Callable[[], object]):
        """`idle` is called when the last one has ended."""
        self.running: set[asyncio.Future[Any]] = set()
        self._idle = idle
        self._kind: _Kind = "read"
        self._waiting: deque[_Call] = deque()

    def add(self, kind: _Kind, start: Callable[[], Future[Any]]) -> asyncio.Future[Any]:
        """The outcome of `start`'s future. A call that is cancelled before its turn does not begin."""
        outcome = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(kind, start, outcome))
        self._advance()
        return outcome

    def _advance(self) -> None:
        while self._waiting and (not self.running or self._waiting[0].kind == self._kind):
            call = self._waiting.popleft()
            if call.outcome.done():
                continue
            try:
                job = asyncio.wrap_future(call.start())
            except Exception as error:  # passed on: otherwise the caller would wait for ever
                call.outcome.set_exception(error)
                continue
            self._kind = call.kind
            self.running.add(job)
            job.add_done_callback(partial(self._ended, call.outcome))
        if not self.running:
            self._idle()

    def _ended(self, outcome: asyncio.Future[Any], job: asyncio.Future[Any]) -> None:
        self.running.discard(job)
        if job.cancelled():
            outcome.cancel()
        elif (error := job.exception()) is not None:
            if not outcome.done():
                outcome.set_exception(error)
        elif not outcome.done():
            outcome.set_result(job.result())
        self._advance()


def _names(tenant: str, prefix: str, connection: Connection) -> list[str]:
    found = []
    # In the order of names, those with the prefix are the first from the prefix on.
    for name in connection.execute(_NAMES, {"of_tenant": tenant, "prefix": prefix}).scalars():
        if not name.startswith(prefix):
            break
        found.append(name)
    return found


def _used(connection: Connection, tenant: str) -> int:
    return connection.execute(_USED, {"of_tenant": tenant}).scalar() or 0


def _size(name: str, value: bytes) -> int:
    return len(name.encode()) + len(value)


def _check_quota(size: int, quota: int) -> None:
    if size > quota:
        raise QuotaExceeded(
            f"this tenant would store {size} bytes; it may store {quota}. Delete some values first", "value"
        )
