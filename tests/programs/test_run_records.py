"""Records of runs: kept across restarts and kills of the server, bounded, and without delay for requests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from weft.abi.errors import HostDead, ProgramFailed, StorageFailed, UnknownRun
from weft.programs import run_records as module
from weft.programs.history import History
from weft.programs.registry import Code
from weft.programs.run.runs import Run, RunRecord, RunSpec
from weft.programs.run_records import RunRecords
from weft.store.database import FILE, Database
from weft.store.runs import RunRow

SPEC = RunSpec(code=Code(kind="python", content=b"def main(): pass", hash="0" * 64, name="agent"))


def record(run_id: str, status: str = "finished", **fields: object) -> RunRecord:
    """Of a run that ended one second after its beginning."""
    number = float(run_id.partition("-")[2])
    known = Run(SPEC, "t", id=run_id).record()
    finished_s = None if status in ("queued", "running") else number + 1
    return msgspec.structs.replace(known, status=status, created_s=number, finished_s=finished_s, **fields)


def limit(records: RunRecords, pages: int) -> None:
    sql = f"PRAGMA max_page_count = {pages}"
    with records._database._opened().connect() as connection:
        connection.exec_driver_sql(sql)


def with_records(
    path: Path, test: Callable[[RunRecords], Awaitable[None]], now: Callable[[], float] = time.monotonic
) -> None:
    async def body() -> None:
        records = RunRecords(Database(path), now)
        try:
            await test(records)
        finally:
            await records.close()
            await records.close()

    asyncio.run(body())


def loaded(path: Path) -> list[RunRecord]:
    """As a server that starts now finds them."""
    records = RunRecords(Database(path))
    try:
        return records.load()
    finally:
        asyncio.run(records.close())


def ids(path: Path) -> list[str]:
    return [one.id for one in loaded(path)]


def test_what_ended_is_there_after_a_restart_and_nothing_else_of_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs"
    assert loaded(path) == []
    assert not path.parent.exists()
    known: list[RunRecord] = []

    async def test(records: RunRecords) -> None:
        history = History(journal=records)
        for end in ("finish", "fail"):
            run = Run(SPEC, "t", id=f"run-{len(known)}")
            history.add(run)
            run.start()
            run.emit(b'"said"')
            if end == "finish":
                run.finish(b'"secret"')
            else:
                run.fail(ProgramFailed("it raised", traceback="line 1"))
            history.ended(run)
            known.append(run.record())

    with_records(path, test)
    assert loaded(path) == known
    history = History()
    history.restore(loaded(path))
    assert [run.record() for run in history.runs("t")] == known[::-1]
    assert history.runs("u") == []
    run = history.find("t", "run-1")
    assert (run.ended, run.forgotten, run.result, run.logs()) == (True, True, None, [])
    with pytest.raises(ProgramFailed) as raised:
        asyncio.run(run.answer())
    assert raised.value.traceback == "line 1"
    assert b"secret" not in (path / FILE).read_bytes()


def test_many_changes_are_few_writes_and_flush_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "runs"

    async def test(records: RunRecords) -> None:
        for number in range(500):
            records.began(record(f"run-{number}", "queued"))
            records.ended(record(f"run-{number}"))
        records.forgotten(["run-3", "run-never"])
        await records.flush()
        found = sqlite3.connect(path / FILE).execute("SELECT COUNT(*), COUNT(server) FROM runs").fetchone()
        assert found == (499, 0)
        assert records._database._writer.num_commits < 100

    with_records(path, test)
    assert "run-3" not in ids(path)


def test_a_run_whose_server_was_killed_has_failed_once(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    program = f"""
import asyncio, os, signal
from pathlib import Path
from tests.programs.test_run_records import record
from weft.programs.run_records import RunRecords
from weft.store.database import Database
async def main():
    records = RunRecords(Database(Path({str(path)!r})))
    records.began(record("run-1", "queued"))
    records.ended(record("run-2"))
    records.began(record("run-3", "running"))
    await records.flush()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: loaded(path), range(4)))
    assert found[0] == found[1] == found[2] == found[3]  # one has written down when they were lost, the others read it
    lost, finished, also_lost = found[0]
    assert finished == record("run-2")
    for one in (lost, also_lost):
        assert one.status == "failed"
        assert one.finished_s is not None
        assert one.error is not None
        assert isinstance(one.error.error(), HostDead)
    assert (lost.id, also_lost.id) == ("run-1", "run-3")
    assert not list(path.glob("*.lock"))


def test_the_runs_of_a_server_that_lives_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "runs"

    async def test(first: RunRecords) -> None:
        first.began(record("run-1", "queued"))
        first.ended(record("run-2"))
        await first.flush()
        assert first.load() == [record("run-2")]
        second = RunRecords(Database(path))
        assert second.load() == [record("run-2")]
        second.ended(record("run-3"))
        second.forgotten(["run-2"])
        await second.close()
        first.ended(record("run-1"))

    with_records(path, test)
    assert loaded(path) == [record("run-1"), record("run-3")]


def test_a_disk_that_takes_nothing_is_told_of_once_and_caught_up_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs"
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def test(records: RunRecords) -> None:
        records.ended(record("run-1"))
        await records.flush()
        # The database may not grow: what a full disk looks like to it.
        limit(records, 1)
        for number in range(2, 200):
            records.began(record(f"run-{number}", "running"))
            records.ended(record(f"run-{number}"))
            await records.flush()
        assert caplog.text.count("cannot be written or read") == 1
        assert "full" in caplog.text
        limit(records, 100_000)
        monkeypatch.setattr("weft.store.database.QUIET_S", 0.0)
        records.ended(record("run-200"))
        await records.flush()
        assert caplog.text.count("stored again") == 1

    with_records(path, test)
    assert ids(path) == [f"run-{number}" for number in range(1, 201)]


def test_what_waits_for_a_disk_is_bounded_and_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN", 10)
    (tmp_path / "deep").write_text("no folder")
    path = tmp_path / "deep" / "runs"

    async def test(records: RunRecords) -> None:
        for number in range(30):
            records.ended(record(f"run-{number}"))
            await records.flush()
        (tmp_path / "deep").unlink()

    with_records(path, test)
    assert caplog.text.count("cannot be written or read") == 1
    assert ids(path) == [f"run-{number}" for number in range(20, 30)]


def test_what_waits_for_a_disk_is_encoded_once_and_tried_again_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WRITE", 10)
    path, now = tmp_path / "runs", 0.0
    encoded: list[str] = []
    written: list[int] = []
    row = module._row

    def counted(record: RunRecord) -> RunRow:
        encoded.append(record.id)
        return row(record)

    monkeypatch.setattr(module, "_row", counted)

    async def test(records: RunRecords) -> None:
        nonlocal now
        save, is_full = records._table.save, True

        def noted(changes: Mapping[str, RunRow | None]) -> Future[None]:
            written.append(len(changes))
            if not is_full:
                return save(changes)
            failed: Future[None] = Future()
            failed.set_exception(StorageFailed("the disk is full"))
            return failed

        monkeypatch.setattr(records._table, "save", noted)
        for number in range(1, 31):
            records.ended(record(f"run-{number}"))
            await records.flush()
        assert written == [1], "none is tried after it"
        for number in range(31, 41):
            now += 0.5 * module.RETRY_S
            records.ended(record(f"run-{number}"))
            await records.flush()
        assert written[1:] == [10] * 5
        is_full = False
        now += module.RETRY_S
        records.ended(record("run-41"))
        await records.flush()
        assert written[6:] == [10] * 4 + [1]

    with_records(path, test, lambda: now)
    assert encoded == [f"run-{number}" for number in range(1, 42)]
    assert ids(path) == encoded


@pytest.mark.parametrize("damage", ["garbage", "format", "record"])
def test_damage_is_told_of_and_keeps_no_server_from_starting(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "runs"
    if damage == "garbage":
        path.mkdir()
        (path / FILE).write_bytes(b"not a database" * 1000)
    else:

        async def test(records: RunRecords) -> None:
            records.ended(record("run-1"))
            records.ended(record("run-2"))

        with_records(path, test)
        change = (
            "UPDATE schema_version SET version = 99"
            if damage == "format"
            else "UPDATE runs SET record = '{' WHERE id = 'run-1'"
        )
        with sqlite3.connect(path / FILE) as database:
            database.execute(change)
    before = (path / FILE).read_bytes()
    assert ids(path) == (["run-2"] if damage == "record" else [])
    assert "cannot be read" in caplog.text
    assert (path / FILE).read_bytes()[:100] == before[:100]


def test_history_keeps_the_last_and_the_recent_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    now = 1000.0

    async def test(records: RunRecords) -> None:
        nonlocal now
        history = History(max_ended=3, max_age_s=100, journal=records, now=lambda: now)
        history.restore([record(f"run-{number}") for number in (950, 10)])
        assert [run.id for run in history.runs("t")] == ["run-950"]
        for number in (960, 970, 980):
            run = Run.restored(record(f"run-{number}"))
            history.add(run)
            history.ended(run)
        assert [run.id for run in history.runs("t")] == ["run-980", "run-970", "run-960"]
        now = 1075.0
        with pytest.raises(UnknownRun):
            history.find("t", "run-970")
        history.forget("t", "run-980")
        assert history.runs("t") == []

    with_records(path, test)
    assert loaded(path) == []


def test_a_run_that_ended_and_was_not_told_of_yet_is_not_forgotten_twice() -> None:
    history = History(max_ended=0)
    first, second = Run(SPEC, "t"), Run(SPEC, "t")
    for run in (first, second):
        history.add(run)
        run.start()
        run.finish(b"1")
    history.ended(second)
    assert history.runs("t") == [first]
    history.ended(first)
    assert history.runs("t") == []
    third = Run(SPEC, "t")
    history.add(third)
    third.fail(HostDead("x"))
    history.forget("t", third.id)
    history.ended(third)
    assert history.runs("t") == []
