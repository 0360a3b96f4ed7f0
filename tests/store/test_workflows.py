"""Runs of workflows and the prompt cache: what is kept, and how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from weft.abi.errors import StorageFailed
from weft.store import served_runs as module
from weft.store.answers import AnswerTable
from weft.store.database import Database
from weft.store.schema import leftovers, workflow_endings, workflow_inputs, workflow_rows, workflow_traces
from weft.store.served_runs import NewRun, ServedRunTable
from weft.store.workflow_runs import SavedRun, WorkflowRunTable


@pytest.fixture(params=["file", "memory"])
def database(request: pytest.FixtureRequest, tmp_path: Path):
    made = Database(tmp_path / "data" if request.param == "file" else None)
    yield made
    made.close()


def test_a_run_is_found_again_with_what_it_has(tmp_path: Path) -> None:
    first = Database(tmp_path)
    table = WorkflowRunTable(first)
    assert table.begin("r", b"this") == b"this"
    table.keep_task("r", 0, "a", b"1")
    table.keep_task("r", 1, "a", b"2")
    table.keep_task("r", 1, "m[0].b", b"3")
    table.keep_task("r", 1, "a", b"4")
    table.end_row("r", 0, b"result")
    table.begin("other", b"")
    table.keep_task("other", 0, "a", b"5").result()
    first.close()

    table = WorkflowRunTable(again := Database(tmp_path))
    assert table.begin("r", b"another") == b"this"
    assert table.load("r") == SavedRun({0: b"result"}, {(1, "a"): b"4", (1, "m[0].b"): b"3"})
    table.forget_tasks("r")
    assert table.load("r") == SavedRun({0: b"result"}, {})
    table.forget("r")
    assert table.load("r") == SavedRun({}, {})
    assert table.load("other").tasks == {(0, "a"): b"5"}
    again.close()


def test_answers_are_kept_by_tenant_and_key(database: Database) -> None:
    table = AnswerTable(database)
    table.put("a", "k", b"1").result()
    table.put("a", "k", b"2").result()
    table.put("b", "k", b"3").result()
    assert table.get("a", "k") == b"2"
    assert table.get("b", "k") == b"3"
    assert table.get("c", "k") is None
    assert table.get("a", "l") is None


def test_the_least_recently_used_answers_go_first_and_only_those_of_their_tenant(database: Database) -> None:
    table = AnswerTable(database, max_bytes=40)
    table.put("other", "0", b"x" * 9).result()
    for key in "1234":
        table.put("a", key, b"x" * 9).result()
    assert table.get("a", "1") is not None
    table.put("a", "5", b"x" * 9).result()
    database.write(lambda connection: None).result()
    assert [key for key in "12345" if table.get("a", key)] == ["1", "4", "5"], "a tenth is free"
    assert table.get("other", "0") is not None
    table.put("a", "most", b"x" * 35).result()
    assert [key for key in ("1", "4", "5", "most") if table.get("a", key)] == ["most"]
    table.put("a", "large", b"x" * 100).result()
    assert table.get("a", "large") is None
    assert table.get("a", "most") is not None


def test_answers_are_looked_through_seldom_once_there_is_no_room(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rooms = AnswerTable(database, max_bytes=1000), []
    make_room = table._make_room

    def counted(*args: Any) -> int:
        rooms.append(args)
        return make_room(*args)

    monkeypatch.setattr(table, "_make_room", counted)
    for key in range(500):
        table.put("", f"{key:03}", b"x" * 7).result()
    assert 30 < len(rooms) < 50, "once for a tenth of the bytes"
    assert [bool(table.get("", f"{key:03}")) for key in (380, 450, 499)] == [False, True, True]


def test_another_process_s_answers_count_too(tmp_path: Path) -> None:
    one, two = Database(tmp_path), Database(tmp_path)
    first, second = AnswerTable(one, 40), AnswerTable(two, 40)
    for key in "1234":
        (first if key in "12" else second).put("", key, b"x" * 9).result()
    second.put("", "5", b"x" * 9).result()
    assert [key for key in "12345" if second.get("", key)] == ["3", "4", "5"]
    one.close()
    two.close()


NUM_ROWS = 10


def served(database: Database, *runs: str) -> ServedRunTable:
    """Runs of tenant t that have ended, in this order, with as many rows each."""
    table = ServedRunTable(database, 1 << 20)
    for number, run in enumerate(runs):
        table.begin(NewRun(run, "t", None, float(number), b"{}", [(0, b"[]")]))
        for row in range(NUM_ROWS):
            table.end_row("t", run, row, b"result", failed=False, calls=b"calls")
        table.end("t", run, b"{}", float(number), is_complete=True).result()
    return table


def num_stored(database: Database) -> list[int]:
    """Rows in each table with rows of runs, and removed runs of which some are left."""
    tables = (workflow_inputs, workflow_rows, workflow_endings, workflow_traces, leftovers)
    return database.read(
        lambda connection: [
            connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
        ]
    )


def test_a_run_is_gone_at_once_and_its_rows_in_many_writes(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLEARED_ROWS", 4)
    clear_some, left = module._clear_some, list[tuple[bool, int]]()

    def noted(run: str, connection: Connection) -> bool:
        is_there = connection.execute(module._FIND, {"this": run, "of_tenant": "t"}).one_or_none() is not None
        before = connection.execute(select(func.total_changes())).scalar_one()
        more = clear_some(run, connection)
        left.append((is_there, connection.execute(select(func.total_changes())).scalar_one() - before))
        return more

    monkeypatch.setattr(module, "_clear_some", noted)
    table = served(database, "a", "b", "c", "d")
    before = database._writer.num_commits
    assert table.forget("t", "b")
    num_slices = -(-(1 + 3 * NUM_ROWS) // 4)
    assert left == [(False, 4)] * num_slices, "the last has 3 rows and the id of the run"
    assert database._writer.num_commits == before + 1 + num_slices
    assert num_stored(database) == [3, *[3 * NUM_ROWS] * 3, 0]
    assert table.forget("u", "a"), "of another tenant"
    assert num_stored(database) == [3, *[3 * NUM_ROWS] * 3, 0]
    table.forget_old("t", 1, 0.0).result()
    assert num_stored(database) == [1, *[NUM_ROWS] * 3, 0]
    assert [run.run for run in table.all("t")] == ["d"]


def test_what_is_left_of_a_removed_run_goes_when_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLEARED_ROWS", 4)
    clear_some, num_writes = module._clear_some, 0

    def fail(run: str, connection: Connection) -> bool:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 2:
            raise StorageFailed("the disk is full")
        return clear_some(run, connection)

    first = Database(tmp_path)
    table = served(first, "a", "b")
    WorkflowRunTable(first).end_row("c", 0, b"of another owner").result()
    with monkeypatch.context() as patched:
        patched.setattr(module, "_clear_some", fail)
        assert table.forget("t", "a")
    assert table.find("t", "a") is None
    assert num_stored(first) == [1, 2 * NUM_ROWS - 7 + 1, 2 * NUM_ROWS, 2 * NUM_ROWS, 1]
    first.close()

    again = Database(tmp_path)
    assert ServedRunTable(again, 1 << 20).take_over(lambda run: True) == []
    while num_stored(again)[-1]:  # Each write lets the server delete more.
        again.write(lambda connection: None).result()
    assert num_stored(again) == [1, NUM_ROWS + 1, NUM_ROWS, NUM_ROWS, 0]
    again.close()
