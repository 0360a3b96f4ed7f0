"""Values of tenants: kept, counted, and there again after whatever happened to the process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from weft.abi.errors import InvalidRequest, QuotaExceeded, StorageFailed
from weft.store.database import FILE, Database
from weft.store.values import INLINE_BYTES, DatabaseValueStore, MemoryValueStore, ValueStore

Make = Callable[[int], ValueStore]


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryValueStore
    return lambda quota: DatabaseValueStore(Database(tmp_path / "deep" / "data"), quota)


def with_store(make: Make, test: Callable[[ValueStore], Awaitable[None]], quota: int = 1000) -> None:
    async def body() -> None:
        store = make(quota)
        try:
            await test(store)
        finally:
            await store.close()
            await store.close()

    asyncio.run(body())


def limit(store: ValueStore, pages: int) -> None:
    assert isinstance(store, DatabaseValueStore)
    store._database.write(lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")).result()


def test_values_by_tenant_and_name(make: Make) -> None:
    async def test(store: ValueStore) -> None:
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
    async def test(store: ValueStore) -> None:
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
    async def test(store: ValueStore) -> None:
        with pytest.raises(InvalidRequest):
            await store.put("t", name, b"")

    with_store(make, test)


def test_quota_and_values_outlive_the_store(tmp_path: Path) -> None:
    def make(quota: int) -> ValueStore:
        return DatabaseValueStore(Database(tmp_path / "v"), quota)

    async def write(store: ValueStore) -> None:
        await store.put("t", "a", bytes(900))

    async def read(store: ValueStore) -> None:
        assert await store.get("t", "a") == bytes(900)
        with pytest.raises(QuotaExceeded):
            await store.put("t", "b", bytes(200))

    with_store(make, write)
    with_store(make, read)


def test_what_was_awaited_survives_a_kill(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, signal
from pathlib import Path
from weft.store.database import FILE, Database
from weft.store.values import DatabaseValueStore
async def main():
    store = DatabaseValueStore(Database(Path({str(tmp_path / "v")!r})))
    for n in range(20):
        await store.put("t", f"{{n}}", b"x")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL

    async def read(store: ValueStore) -> None:
        assert len(await store.names("t", "")) == 20

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), read)


def test_a_full_disk_is_a_clear_error_and_the_old_value_stays(tmp_path: Path) -> None:
    async def test(store: ValueStore) -> None:
        await store.put("t", "a", b"old")
        # The database may not grow: what a full disk looks like to it.
        limit(store, 3)
        with pytest.raises(StorageFailed, match=r"full; free space"):
            await store.put("t", "a", bytes(INLINE_BYTES))
        assert await store.get("t", "a") == b"old"
        limit(store, 10_000)
        await store.put("t", "a", bytes(INLINE_BYTES))

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test, quota=1 << 20)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def test(store: ValueStore) -> None:
        for _ in range(2):
            with pytest.raises(StorageFailed, match="writable"):
                await store.get("t", "a")

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "file" / "v"), quota), test)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / FILE).write_bytes(b"not a database" * 100)

    async def test(store: ValueStore) -> None:
        with pytest.raises(StorageFailed, match="damaged"):
            await store.put("t", "a", b"")

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test)
    assert (tmp_path / "v" / FILE).read_bytes() == b"not a database" * 100


def test_calls_are_carried_out_in_order_and_may_be_given_up(tmp_path: Path) -> None:
    async def test(store: ValueStore) -> None:
        first = asyncio.create_task(store.put("t", "a", b"1"))
        second = asyncio.create_task(store.put("t", "a", b"2"))
        reading = asyncio.create_task(store.get("t", "a"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert await reading == b"2"
        await store.close()
        with pytest.raises(StorageFailed, match="shutting down"):
            await store.get("t", "a")

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test)


def test_a_call_waits_for_the_other_kinds_before_it(tmp_path: Path) -> None:
    large = bytes(INLINE_BYTES + 1)

    async def test(store: ValueStore) -> None:
        calls: list[Awaitable[object]] = []
        for number in range(20):
            calls.append(store.put("t", "a", b"%d" % number))
            calls.append(store.get("t", "a"))
            calls.append(store.put("t", "a", large + b"%d" % number))
            calls.append(store.names("t", "a"))
            calls.append(store.get("t", "a"))
            calls.append(store.delete("t", "a"))
            calls.append(store.get("t", "a"))
        found = await asyncio.gather(*calls)
        for number in range(20):
            of_round = found[7 * number : 7 * number + 7]
            assert of_round == [None, b"%d" % number, None, ["a"], large + b"%d" % number, None, None]

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test, quota=1 << 20)


def test_large_values_are_files_and_no_file_is_left_over(tmp_path: Path) -> None:
    blobs = tmp_path / "v" / "blobs"
    large = bytes(INLINE_BYTES + 1)

    def num_files() -> int:
        return len(list(blobs.iterdir())) if blobs.exists() else 0

    async def test(store: ValueStore) -> None:
        for value, count in ((large, 1), (large + b"2", 1), (b"small", 0), (large, 1)):
            await store.put("t", "a", value)
            assert await store.get("t", "a") == value
            assert num_files() == count
        with pytest.raises(QuotaExceeded):
            await store.put("t", "b", large)
        assert num_files() == 1
        await store.put("u", "a", large)
        await store.delete("t", "a")
        assert num_files() == 1
        [path] = blobs.iterdir()
        path.unlink()
        with pytest.raises(StorageFailed, match="lost its content"):
            await store.get("u", "a")
        await store.put("u", "a", b"")

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test, quota=100_000)


def test_writes_that_wait_share_a_commit_and_a_quota_fails_alone(tmp_path: Path) -> None:
    async def test(store: ValueStore) -> None:
        assert isinstance(store, DatabaseValueStore)
        await store.put("t", "first", b"")
        before, go = store._database._writer.num_commits, threading.Event()
        holding = store._database.write(lambda connection: go.wait(10))
        puts = [asyncio.ensure_future(store.put("t", f"{number:03}", bytes(97))) for number in range(30)]
        await asyncio.sleep(0)
        go.set()
        found = await asyncio.gather(*puts, return_exceptions=True)
        # A name and its value take 100 bytes, and 5 are taken.
        assert [type(one) for one in found] == [type(None)] * 9 + [QuotaExceeded] * 21
        assert holding.result()
        assert len(await store.names("t", "0")) == 9
        assert store._database._writer.num_commits == before + 1

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test)


def test_a_call_that_cannot_begin_fails_and_keeps_none_after_it_waiting(tmp_path: Path) -> None:
    async def test(store: ValueStore) -> None:
        assert isinstance(store, DatabaseValueStore)
        await store.put("t", "a", b"1")
        holding, go = asyncio.ensure_future(store.get("t", "a")), threading.Event()
        held = store._database.write(lambda connection: go.wait(10))
        written, read = asyncio.ensure_future(store.put("t", "a", b"2")), asyncio.ensure_future(store.get("t", "a"))
        await holding
        store._threads.close()
        go.set()
        await written
        # The read, whose turn comes now, is refused in a callback of the write.
        with pytest.raises(RuntimeError, match="closed"):
            await read
        await store.put("t", "a", b"3")
        assert held.result()

    with_store(lambda quota: DatabaseValueStore(Database(tmp_path / "v"), quota), test)
