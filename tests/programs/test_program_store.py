"""Values of tenants: kept, counted, and there again after whatever happened to the process."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from weft.abi.errors import InvalidRequest, QuotaExceeded, StorageFailed
from weft.programs.store import MemoryStore, SqliteStore, Store

Make = Callable[[int], Store]


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryStore
    return lambda quota: SqliteStore(tmp_path / "deep" / "values.sqlite3", quota)


def with_store(make: Make, test: Callable[[Store], Awaitable[None]], quota: int = 1000) -> None:
    async def body() -> None:
        store = make(quota)
        try:
            await test(store)
        finally:
            await store.close()
            await store.close()

    asyncio.run(body())


def test_values_by_tenant_and_name(make: Make) -> None:
    async def test(store: Store) -> None:
        assert await store.get("t", "a") is None
        await store.put("t", "a", b"1")
        await store.put("t", "a", b"2\x00")
        await store.put("u", "a", b"3")
        await store.put("t", "a/ü", b"")
        await store.put("t", "b", b"4")
        assert await store.get("t", "a") == b"2\x00"
        assert await store.get("t", "a/ü") == b""
        assert await store.get("u", "a") == b"3"
        assert await store.names("t", "") == ["a", "a/ü", "b"]
        assert await store.names("t", "a/") == ["a/ü"]
        assert await store.names("t", "%") == []
        await store.delete("t", "a")
        await store.delete("t", "a")
        assert await store.names("t", "") == ["a/ü", "b"]

    with_store(make, test)


def test_a_tenant_has_a_quota_of_its_own(make: Make) -> None:
    async def test(store: Store) -> None:
        await store.put("t", "a", bytes(900))
        await store.put("t", "a", bytes(999))
        with pytest.raises(QuotaExceeded, match="1000"):
            await store.put("t", "b", b"")
        with pytest.raises(QuotaExceeded):
            await store.put("t", "a", bytes(1000))
        assert await store.get("t", "a") == bytes(999)
        await store.put("u", "a", bytes(999))
        await store.delete("t", "a")
        await store.put("t", "b", bytes(999))

    with_store(make, test)


@pytest.mark.parametrize("name", ["", "x" * 513, "ü" * 257, "a\nb", "\x00", "\x7f", "\ud800"])
def test_names_that_cannot_be(make: Make, name: str) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(InvalidRequest):
            await store.put("t", name, b"")

    with_store(make, test)


def test_quota_and_values_outlive_the_store(tmp_path: Path) -> None:
    def make(quota: int) -> Store:
        return SqliteStore(tmp_path / "v", quota)

    async def write(store: Store) -> None:
        await store.put("t", "a", bytes(900))

    async def read(store: Store) -> None:
        assert await store.get("t", "a") == bytes(900)
        with pytest.raises(QuotaExceeded):
            await store.put("t", "b", bytes(200))

    with_store(make, write)
    with_store(make, read)


def test_what_was_awaited_survives_a_kill(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, signal
from pathlib import Path
from weft.programs.store import SqliteStore
async def main():
    store = SqliteStore(Path({str(tmp_path / "v")!r}))
    for n in range(20):
        await store.put("t", f"{{n}}", b"x")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL

    async def read(store: Store) -> None:
        assert len(await store.names("t", "")) == 20

    with_store(lambda quota: SqliteStore(tmp_path / "v", quota), read)


def test_a_full_disk_is_a_clear_error_and_the_old_value_stays(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        await store.put("t", "a", b"old")
        # The database may not grow: what a full disk looks like to it.
        await store._run(lambda: store._open().execute("PRAGMA max_page_count = 3"))
        with pytest.raises(StorageFailed, match=r"full.*disk has room"):
            await store.put("t", "a", bytes(100_000))
        assert await store.get("t", "a") == b"old"
        await store._run(lambda: store._open().execute("PRAGMA max_page_count = 10000"))
        await store.put("t", "a", bytes(100_000))

    with_store(lambda quota: SqliteStore(tmp_path / "v", quota), test, quota=1 << 20)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def test(store: Store) -> None:
        for _ in range(2):
            with pytest.raises(StorageFailed, match="may be written"):
                await store.get("t", "a")

    with_store(lambda quota: SqliteStore(tmp_path / "file" / "v", quota), test)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"not a database" * 100)

    async def test(store: Store) -> None:
        with pytest.raises(StorageFailed):
            await store.put("t", "a", b"")

    with_store(lambda quota: SqliteStore(tmp_path / "v", quota), test)
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(tmp_path / "v").execute("SELECT * FROM program_values")


def test_calls_are_carried_out_in_order_and_may_be_given_up(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        first = asyncio.create_task(store.put("t", "a", b"1"))
        second = asyncio.create_task(store.put("t", "a", b"2"))
        reading = asyncio.create_task(store.get("t", "a"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert await reading == b"2"
        await store.close()
        with pytest.raises(StorageFailed, match="closed"):
            await store.get("t", "a")

    with_store(lambda quota: SqliteStore(tmp_path / "v", quota), test)
