"""Two servers on one folder: nothing that one of them was told is lost, and no quota is had twice."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weft.abi.errors import QuotaExceeded, StorageFailed, UnknownProgram
from weft.programs.registry import Quota, Registry
from weft.store import sqlite
from weft.store.database import Database
from weft.store.programs import ProgramTable, ProgramVersion
from weft.store.values import DatabaseValueStore

ONE = b"async def main(args):\n    return 1\n"
TWO = b"async def main(args):\n    return 2\n"
PROCESSES = 3


def at_once(program: str, folder: Path) -> None:
    """The same program as several processes, which all begin when the last one has started. `me` is the number of
    each."""
    start = folder / "start"
    source = f"""
import os, sys, time
from pathlib import Path
me, folder, start = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
{textwrap.dedent(program)}
(folder / f"here-{{me}}").touch()
while not start.exists():
    time.sleep(0.001)
main()
"""
    command = [sys.executable, "-c", source]
    running = [
        subprocess.Popen([*command, str(me), str(folder), str(start)], env=dict(os.environ)) for me in range(PROCESSES)
    ]
    try:
        while not all((folder / f"here-{me}").exists() or running[me].poll() is not None for me in range(PROCESSES)):
            os.sched_yield()
        start.touch()
        assert [process.wait(60) for process in running] == [0] * PROCESSES
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_no_upload_is_lost(tmp_path: Path) -> None:
    program = """
        from weft.programs.registry import Registry
        from weft.store.database import Database
        def main():
            for number in range(10):
                registry = Registry(Database(folder / "programs")) if number % 5 == 0 else registry
                registry.upload("t", f"p{me}-{number}", b"def main():\\n    return %d" % (10 * me + number))
                registry.upload("t", "all", b"def main():\\n    return -%d" % (10 * me + number))
                registry.upload(f"new {number}", f"p{me}", b"def main(): pass")
    """
    at_once(program, tmp_path)
    registry = Registry(Database(tmp_path / "programs"))
    found = {program.name for program in registry.programs("t")}
    assert found == {f"p{me}-{number}" for me in range(PROCESSES) for number in range(10)} | {"all"}
    assert len(registry.find("t", "all")[0].versions) == 10 * PROCESSES
    for number in range(10):
        assert len(registry.programs(f"new {number}")) == PROCESSES
    for program in registry.programs("t"):
        for version in program.versions:
            assert registry.code("t", version.hash).content.startswith(b"def main()")


def test_what_one_server_changes_the_other_sees(tmp_path: Path) -> None:
    first, second = Registry(Database(tmp_path)), Registry(Database(tmp_path))
    version = first.upload("t", "agent", ONE).latest
    assert second.find("t", "agent")[1] == version
    second.upload("t", "agent", TWO)
    assert first.code("t", "agent").content == TWO
    second.delete("t", "agent")
    assert first.programs("t") == []
    with pytest.raises(UnknownProgram):
        first.delete("t", "agent")
    small = Registry(Database(tmp_path), Quota(max_programs=1))
    first.upload("t", "agent", ONE)
    with pytest.raises(QuotaExceeded):
        small.upload("t", "other", TWO)


def test_a_server_that_starts_leaves_what_another_one_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.0)
    first = Registry(Database(tmp_path))
    first.upload("t", "agent", ONE)
    started = Registry(Database(tmp_path))
    assert started.code("t", "agent").content == ONE
    begun, go = threading.Event(), threading.Event()
    upload = ProgramTable(first._database)

    def check(count: int, used_bytes: int) -> None:
        begun.set()
        go.wait(10)

    def add() -> object:
        hash = hashlib.sha256(TWO).hexdigest()
        version = ProgramVersion(hash=hash, kind="python", size_bytes=len(TWO), created_s=0.0)
        return upload.add("t", "slow", version, TWO, check)

    with ThreadPoolExecutor(1) as threads:
        adding = threads.submit(add)
        begun.wait(10)
        # The first server is in the middle of an upload: its content is there, and no row names it.
        with pytest.raises(StorageFailed, match="another server"):
            started.upload("t", "other", TWO)
        assert started.code("t", "agent").content == ONE
        with pytest.raises(StorageFailed, match="another server"):
            Registry(Database(tmp_path)).programs("t")
        assert len(list((tmp_path / "blobs").iterdir())) == 2
        go.set()
        adding.result()
    assert [program.name for program in Registry(Database(tmp_path)).programs("t")] == ["agent", "slow"]
    assert started.code("t", "slow").content == TWO


def test_no_value_is_lost_and_a_quota_is_had_once(tmp_path: Path) -> None:
    program = """
        import asyncio
        from weft.abi.errors import QuotaExceeded
        from weft.store.database import Database
        from weft.store.values import DatabaseValueStore
        def main():
            async def body():
                store = DatabaseValueStore(Database(folder / "deep"), 2000)
                for number in range(20):
                    await store.put("t", f"{me}-{number:02}", b"x")
                    try:
                        await store.put("u", f"{me}-{number:02}", bytes(95))
                    except QuotaExceeded:
                        pass
                await store.close()
            asyncio.run(body())
    """
    at_once(program, tmp_path)

    async def check() -> None:
        store = DatabaseValueStore(Database(tmp_path / "deep"), 2000)
        assert len(await store.names("t", "")) == 20 * PROCESSES
        # Each takes 99 bytes: there is room for 20 of the 60 that were tried.
        assert len(await store.names("u", "")) == 20
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "deep").iterdir()} == {0o600}
        await store.close()

    asyncio.run(check())
