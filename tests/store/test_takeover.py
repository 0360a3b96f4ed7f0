"""What earlier versions kept is there after the first start, all of it or none, wherever that start is ended."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError

from tests.programs.test_run_records import record
from weft.abi.errors import HostDead, QuotaExceeded, StorageFailed
from weft.programs.registry import Registry
from weft.programs.run_records import RunRecords
from weft.store import sqlite, takeover
from weft.store.blobs import FolderBlobs
from weft.store.database import FILE, Database
from weft.store.values import INLINE_BYTES, DatabaseValueStore

ONE, TWO = b"def main(): return 1\n", b"def main(): return 2\n"
LARGE = bytes(INLINE_BYTES + 1)


def make_old(folder: Path) -> None:
    """What the versions before the database kept, in their formats."""
    folder.mkdir()
    for tenant, names in (("", {"agent": [ONE, TWO], "other": [ONE]}), ("../b", {"agent": [TWO]})):
        place = folder / "programs" / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        place.mkdir(parents=True)
        (place / "tenant").write_text(tenant)
        versions = {}
        for content in sorted({content for contents in names.values() for content in contents}):
            (place / f"{_hash(content)}.program").write_bytes(content)
            versions[_hash(content)] = {
                "hash": _hash(content),
                "kind": "python",
                "size_bytes": len(content),
                "created_s": 12.5,
            }
        index = {"versions": versions, "names": {name: [_hash(one) for one in names[name]] for name in names}}
        (place / "index.json").write_text(json.dumps(index))
        (place / f"{'0' * 64}.program.abcd.partial").write_bytes(b"of an interrupted upload")
    with closing(sqlite3.connect(folder / "runs.sqlite")) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(
            "CREATE TABLE program_runs (id TEXT PRIMARY KEY, owner TEXT, created_s REAL NOT NULL, "
            "record BLOB NOT NULL) WITHOUT ROWID"
        )
        database.execute("PRAGMA user_version = 1")
        for run, owner in ((record("run-1"), None), (record("run-2", "running"), "0123456789abcdef")):
            row = (run.id, owner, run.created_s, msgspec.json.encode(run))
            database.execute("INSERT INTO program_runs VALUES (?, ?, ?, ?)", row)
    (folder / "runs.sqlite.0123456789abcdef.lock").touch()
    with closing(sqlite3.connect(folder / "store.sqlite")) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(
            "CREATE TABLE program_values (tenant TEXT NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL, "
            "PRIMARY KEY (tenant, name)) WITHOUT ROWID"
        )
        rows = [("t", f"n{number:04}", b"x") for number in range(1200)]
        database.executemany("INSERT INTO program_values VALUES (?, ?, ?)", [*rows, ("u", "ü", LARGE)])


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def assert_taken_over(folder: Path) -> None:
    """All of it is there, and nothing of the old form."""
    registry = Registry(Database(folder))
    assert [(one.name, len(one.versions)) for one in registry.programs("")] == [("agent", 2), ("other", 1)]
    assert registry.find("", "agent")[1].created_s == 12.5
    assert registry.code("", "agent").content == registry.code("../b", "agent").content == TWO
    assert registry.code("", "other").content == ONE
    registry.upload("", "agent", ONE)
    assert registry.code("", "agent").content == ONE

    async def check() -> None:
        records = RunRecords(Database(folder))
        ended, lost = records.load()
        assert ended == record("run-1")
        assert (lost.id, lost.status) == ("run-2", "failed")
        assert lost.error is not None
        assert isinstance(lost.error.error(), HostDead)
        await records.close()
        values = DatabaseValueStore(Database(folder), quota_bytes=1200 * 6)
        assert await values.names("t", "") == [f"n{number:04}" for number in range(1200)]
        assert (await values.get("t", "n0700"), await values.get("u", "ü")) == (b"x", LARGE)
        with pytest.raises(QuotaExceeded):
            await values.put("t", "more", b"")
        await values.delete("t", "n0000")
        await values.put("t", "more", b"")
        await values.close()

    asyncio.run(check())
    registry.close()
    assert sorted(path.name for path in folder.iterdir()) == ["blobs", FILE]
    assert len(list((folder / "blobs").iterdir())) == 3


def take_over(folder: Path) -> None:
    database = Database(folder)
    try:
        database.read(lambda _: None)
    finally:
        database.close()


def test_everything_is_taken_over(tmp_path: Path) -> None:
    make_old(tmp_path / "data")
    assert_taken_over(tmp_path / "data")


@pytest.mark.parametrize("steps", ["few", pytest.param("all", marks=pytest.mark.soak)])
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, steps: str) -> None:
    make_old(tmp_path / "old")
    before = contents(tmp_path / "old")
    step, ended, found = 0, -signal.SIGKILL, set()
    while ended == -signal.SIGKILL:
        folder = tmp_path / f"{step}"
        shutil.copytree(tmp_path / "old", folder)
        ended = killed_at(step, folder, steps)
        after = contents(folder)
        with closing(sqlite3.connect(folder / FILE)) as database:
            new = bool(database.execute("SELECT * FROM sqlite_master WHERE name = 'schema_version'").fetchall())
        found.add(new)
        if not new:
            assert {path: after.get(path) for path in before} == before, step
        assert_taken_over(folder)
        shutil.rmtree(folder)
        step += 1
    assert ended == 0
    assert found == {False, True}
    assert step > (4 if steps == "few" else 60)


def contents(folder: Path) -> dict[Path, bytes]:
    """Of the old files; databases as they are read, since looking at one may move its log into it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name in ("runs.sqlite", "store.sqlite"):
            with closing(sqlite3.connect(path)) as database:
                found[path.relative_to(folder)] = "\n".join(database.iterdump()).encode()
        elif path.is_file() and path.suffix not in (".sqlite-wal", ".sqlite-shm") and FILE not in path.name:
            found[path.relative_to(folder)] = path.read_bytes()
    return found


def killed_at(step: int, folder: Path, steps: str) -> int:
    """The status of a process that takes the folder over and is killed before its step of this number."""
    child = os.fork()
    if child == 0:
        try:
            count_steps(step, steps)
            take_over(folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_steps(kill_at: int, steps: str) -> None:
    """In a process of its own: everything that may change a file counts, or only commits and what comes after them."""
    num_steps = 0

    def count(*_: Any, **__: Any) -> None:
        nonlocal num_steps
        if num_steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        num_steps += 1

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (count(), work(*args, **named))[1]

    event.listen(Engine, "commit", count)
    shutil.rmtree = counted(shutil.rmtree)
    if steps == "all":
        event.listen(Engine, "before_cursor_execute", count)
        for name in ("open", "unlink", "rmdir", "link", "mkdir", "fsync"):
            setattr(os, name, counted(getattr(os, name)))


def test_a_server_of_the_earlier_version_has_to_be_stopped_first(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_old(folder)
    before = contents(folder)
    with (folder / "runs.sqlite.0123456789abcdef.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageFailed, match="earlier version"):
            take_over(folder)
    assert contents(folder) == before
    assert_taken_over(folder)


def test_files_that_come_later_are_left_alone(tmp_path: Path) -> None:
    take_over(tmp_path / "data")
    (tmp_path / "data" / "store.sqlite").write_bytes(b"of a server of the earlier version")
    take_over(tmp_path / "data")
    assert (tmp_path / "data" / "store.sqlite").exists()


@pytest.mark.parametrize("damaged", ["index", "content", "runs", "values", "format", "empty"])
def test_what_is_damaged_stays_and_the_rest_is_taken_over(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    make_old(folder)
    place = folder / "programs" / hashlib.sha256(b"").hexdigest()[:32]
    path = {
        "index": place / "index.json",
        "content": place / f"{_hash(ONE)}.program",
        "runs": folder / "runs.sqlite",
        "values": folder / "store.sqlite",
        "format": folder / "runs.sqlite",
        "empty": folder / "store.sqlite",
    }[damaged]
    if damaged == "content":
        path.unlink()
    elif damaged == "format":
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA user_version = 2")
    else:
        path.write_bytes(b"" if damaged == "empty" else b"nonsense" * 100)
    kept = path.read_bytes() if path.exists() else None
    take_over(folder)
    if damaged in ("content", "empty"):
        assert not (folder / "programs").exists()
        assert not (folder / "store.sqlite").exists()
    else:
        assert path.read_bytes()[:16] == kept[:16] if kept else False
        assert "cannot be read" in caplog.text
    assert ("lost its content" in caplog.text) == (damaged == "content")
    registry = Registry(Database(folder))
    assert registry.code("../b", "agent").content == TWO
    assert len(registry.programs("")) == {"index": 0, "content": 1}.get(damaged, 2)
    registry.close()
    with closing(sqlite3.connect(folder / FILE)) as database:
        counts = [database.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in ("runs", "program_values")]
    assert counts == [0 if damaged in ("runs", "format") else 2, 0 if damaged in ("values", "empty") else 1201]


@pytest.mark.parametrize("full", ["contents", "rows"])
def test_a_disk_that_is_full_in_a_take_over_leaves_it_to_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """The disk fills up for one server in the middle of its take-over, while a second one waits to begin its own."""
    folder = tmp_path / "data"
    make_old(folder)
    first, inside, waits = threading.current_thread(), threading.Event(), threading.Event()
    begin, adopt, take = sqlite._begin, FolderBlobs.adopt, takeover.take_over
    adopted = 0

    def begins(connection: Connection) -> None:
        if threading.current_thread() is not first and connection.get_execution_options().get("weft_writes"):
            waits.set()
        begin(connection)

    def takes(connection: Connection, *where: Any) -> None:
        if threading.current_thread() is first:
            inside.set()
            assert waits.wait(60)
            if full == "rows":
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
                connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
        take(connection, *where)

    def adopts(blobs: FolderBlobs, path: Path) -> str:
        nonlocal adopted
        if threading.current_thread() is first:
            adopted += 1
            if full == "contents" and adopted == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return adopt(blobs, path)

    monkeypatch.setattr(sqlite, "_begin", begins)
    monkeypatch.setattr(takeover, "take_over", takes)
    monkeypatch.setattr(FolderBlobs, "adopt", adopts)

    def second() -> None:
        assert inside.wait(60)
        take_over(folder)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        with pytest.raises(StorageFailed, match="the disk is full"):
            take_over(folder)
        other.result(60)
    assert adopted == (2 if full == "contents" else 3)
    assert_taken_over(folder)


def test_a_disk_that_is_full_after_the_take_over_keeps_nothing_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(tmp_path / "data")

    def full(*_: object) -> None:
        raise OperationalError("DELETE", None, sqlite3.OperationalError("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr(takeover, "delete", full)
        registry = Registry(Database(tmp_path / "data"))
        assert registry.code("", "agent").content == TWO
        registry.close()
    assert_taken_over(tmp_path / "data")
