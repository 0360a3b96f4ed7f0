"""A disk that is too full for the prompt cache and for statistics: runs go on, the log says it once, and what others
have stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import ROWS, assert_nothing_left, start
from tests.workflow.shapes import graph, llm
from weft.store import database
from weft.store.database import Database
from weft.workflow.service.service import WorkflowService

ASK = graph(llm("a", "Say {{q}}", max_tokens=3, temperature=0), llm("b", "{{a}}?", max_tokens=2, seed=1))
ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in "ab")
OPTIONAL = ("AnswerTable.put", "StatisticsTable.put")
"""Writes that a run can do without."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    service = partial(WorkflowService, database=Database(tmp_path))
    with running(workflows=service, api_keys=["alice=a", "bob=b"]) as made:
        yield made


@pytest.fixture
def full_for(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Tenants for whose answers and statistics the disk has no room: SQLite refuses to let the file grow."""
    tenants: set[str] = set()
    write = Database.write

    def limited(self: Database, work: Callable[[Connection], Any], tenant: str = "") -> Any:
        if tenant not in tenants or not work.__qualname__.startswith(OPTIONAL):
            return write(self, work, tenant)

        def refused(connection: Connection) -> Any:
            result = work(connection)
            connection.exec_driver_sql("PRAGMA max_page_count = 1")
            try:
                connection.exec_driver_sql("CREATE TABLE more AS SELECT zeroblob(10000000)")
            finally:
                connection.exec_driver_sql("PRAGMA max_page_count = 1073741823")
            return result

        return write(self, refused, tenant)

    monkeypatch.setattr(Database, "write", limited)
    return tenants


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def calls(run: dict[str, Any]) -> tuple[int, int]:
    counts = run["workflow"]["calls"]
    return counts["calls"], counts["cached_calls"]


def test_a_run_goes_on_where_its_cache_and_statistics_have_no_room(
    server: RunningServer, full_for: set[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.http() as client:
        before = start(client, ASK, headers=BOB)
        assert calls(before) == (10, 0)
        full_for.add("alice")
        rows = [{"q": f"{number} of alice"} for number in range(20)]
        first, second = (start(client, ASK, rows, headers=ALICE) for _ in range(2))
        for run in (first, second):
            assert (run["status"], run["workflow"]["failed"]) == ("finished", 0)
            assert calls(run) == (40, 0), "nothing was kept"
        assert len(first["results"]["data"]) == len(second["results"]["data"]) == 20
        # What another tenant has kept, and goes on to keep, is there.
        again = start(client, ASK, [*ROWS, {"q": "new"}], headers=BOB)
        assert calls(again) == (2, 10)
        assert calls(start(client, ASK, [*ROWS, {"q": "new"}], headers=BOB)) == (0, 12)
        full = [line for line in told(caplog) if "the disk is full" in line]
        assert len(full) == 1, told(caplog)
        full_for.clear()
        monkeypatch.setattr(database, "QUIET_S", 0.0)
        assert calls(start(client, ASK, rows, headers=ALICE)) == (40, 0)
        assert calls(start(client, ASK, rows, headers=ALICE)) == (0, 40)
        assert [line for line in told(caplog) if "stored again" in line] == told(caplog)[1:] != []
        assert_nothing_left(server)
