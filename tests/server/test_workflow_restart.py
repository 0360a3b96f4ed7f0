"""Runs of workflows whose server ends: they go on, with equal results, and little is done again."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import ROWS, assert_nothing_left, create, start
from tests.small_disk import fill, small_disk
from tests.workflow.shapes import graph, llm
from weft.core.wire import Generate
from weft.store.database import FILE, Database
from weft.store.served_runs import ServedRunTable, StoredRun
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine
from weft.workflow.service.service import WorkflowService

CHAIN = graph(
    *[llm(f"n{number}", f"{{{{{f'n{number - 1}' if number else 'q'}}}}}", max_tokens=2, seed=3) for number in range(3)]
)
"""Three calls a row, one after the other."""


def on(folder: Path) -> partial[WorkflowService]:
    return partial(WorkflowService, database=Database(folder))


def num_calls(engine: FakeEngine) -> int:
    return sum(isinstance(command, Generate) for command in engine.sent)


def outputs(server: RunningServer, run: str) -> dict[int, str]:
    results = server.http().get(f"/v1/runs/{run}/results").json()["data"]
    return {each["row"]: each["outputs"]["out"] for each in results}


def settled(server: RunningServer, run: str) -> None:
    """Wait for the end of a run."""
    with server.http() as client:
        client.get(f"/v1/runs/{run}/events")


def whole(folder: Path) -> dict[int, str]:
    with running(workflows=on(folder)) as server, server.http() as client:
        run = start(client, CHAIN, cache=False)
        assert num_calls(server.engine) == 15
        return outputs(server, run["id"])


def interrupted(server: RunningServer, steps: int) -> str:
    """Start a run on an engine that only moves when told to, and make it take so many steps."""
    with server.http() as client:
        run = start(client, CHAIN, cache=False, background=True)["id"]
        for _ in range(steps):
            server.wait_until(lambda: bool(server.engine.sequences) or not server.service.workflows.runs.num_running)
            server.on_loop(server.engine.step)
        return run


def test_a_run_that_was_cancelled_as_its_server_stopped_stays_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        run = interrupted(server, 2)
        runs = server.service.workflows.runs
        spawn, held = runs._spawn, []

        def late(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            if not work.__qualname__.endswith("_store_end"):
                return spawn(work)

            async def later() -> None:
                held.append(run)
                try:
                    await asyncio.Event().wait()
                finally:
                    work.close()

            return spawn(later())

        monkeypatch.setattr(runs, "_spawn", late)
        server.on_loop(lambda: runs._live[run].cancel("the user changed their mind"))
        server.wait_until(lambda: bool(held))
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        assert client.get(f"/v1/runs/{run}").json()["status"] == "cancelled"


@pytest.mark.parametrize("steps", [0, 3, 5, 7])
def test_a_killed_server_goes_on(tmp_path: Path, steps: int) -> None:
    expected = whole(tmp_path / "whole")
    with running(auto=False, workflows=on(tmp_path / "data")) as server:
        run = interrupted(server, steps)
        done_before = num_calls(server.engine)
        database = server.service.workflows._database
        database.write(lambda connection: None).result()
        # What a server leaves that is killed now: the file as it is, and a lock that nobody holds.
        (tmp_path / "killed").mkdir()
        with sqlite3.connect(tmp_path / "data" / FILE) as source:
            (tmp_path / "killed" / FILE).write_bytes(source.serialize())
        server.http().post(f"/v1/runs/{run}/cancel")
    with running(workflows=on(tmp_path / "killed")) as server, server.http() as client:
        settled(server, run)
        ended = client.get(f"/v1/runs/{run}").json()
        assert (ended["status"], ended["workflow"]["done"], ended["workflow"]["failed"]) == ("finished", 5, 0)
        assert outputs(server, run) == expected
        assert num_calls(server.engine) + done_before <= 15 + 5  # five calls were in flight
        assert 15 - 5 <= ended["workflow"]["calls"]["calls"] <= 15
    with running(workflows=on(tmp_path / "killed")) as server, server.http() as client:
        assert client.get(f"/v1/runs/{run}").json() == ended
        assert outputs(server, run) == expected
        assert num_calls(server.engine) == 0


@pytest.mark.parametrize("way", ["events", "key"])
def test_a_request_for_a_run_waits_until_it_is_taken_over(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"Idempotency-Key": "once"}
    with running(auto=False, workflows=on(tmp_path)) as server, server.http() as client:
        workflow = create(client, CHAIN)
        path, body = f"/v1/workflows/{workflow}/runs", {"rows": ROWS, "cache": False}
        run = client.post(path, json={**body, "background": True}, headers=key).json()["id"]
    asked, find, take_over = threading.Event(), ServedRunTable.find, ServedRunTable.take_over

    def found(table: ServedRunTable, tenant: str, id: str) -> StoredRun | None:
        asked.set()
        return find(table, tenant, id)

    def late(table: ServedRunTable, serves: Callable[[StoredRun], bool]) -> list[StoredRun]:
        assert asked.wait(60)
        return take_over(table, serves)

    monkeypatch.setattr(ServedRunTable, "find", found)
    monkeypatch.setattr(ServedRunTable, "take_over", late)
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        if way == "events":
            answered = client.get(f"/v1/runs/{run}/events")
        else:  # as a client does whose request broke off
            answered = client.post(path, json=body, headers=key)
            assert answered.json()["id"] == run
        assert (answered.status_code, "finished" in answered.text) == (200, True)


def test_a_server_that_is_shut_down_leaves_runs_to_the_next(tmp_path: Path) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        run = interrupted(server, 4)
    with running(workflows=on(tmp_path)) as server:
        settled(server, run)
        assert server.http().get(f"/v1/runs/{run}").json()["status"] == "finished"
        assert sorted(outputs(server, run)) == [0, 1, 2, 3, 4]
        assert_nothing_left(server)


def test_two_servers_of_one_folder_do_not_take_each_others_runs(tmp_path: Path) -> None:
    with running(auto=False, workflows=on(tmp_path)) as first:
        run = interrupted(first, 1)
        with running(workflows=on(tmp_path)) as second, second.http() as client:
            seen = client.get(f"/v1/runs/{run}").json()
            assert seen["status"] in ("queued", "running")
            assert num_calls(second.engine) == 0
            for refused in (client.get(f"/v1/runs/{run}/events"), client.post(f"/v1/runs/{run}/cancel")):
                assert (refused.status_code, "Another server" in refused.text) == (400, True)
            assert client.delete(f"/v1/runs/{run}").status_code == 400
        first.http().post(f"/v1/runs/{run}/cancel")


def test_values_of_nodes_and_ends_of_rows_are_written_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    write, tenants = Database.write, dict[str, set[str]]()

    def noted(self: Database, work: Callable[[Connection], Any], tenant: str = "") -> Any:
        tenants.setdefault(work.__qualname__.partition(".<")[0], set()).add(tenant)
        return write(self, work, tenant)

    monkeypatch.setattr(Database, "write", noted)
    with running(api_keys=["alice=a"]) as server, server.http(headers={"authorization": "Bearer a"}) as client:
        start(client, CHAIN)
    writes = "WorkflowRunTable.keep_task", "ServedRunTable.end_row"
    assert [tenants[name] for name in writes] == [{"alice"}, {"alice"}], "only those of one tenant stay in their order"


def test_other_weights_end_a_run_that_would_mix_them(tmp_path: Path) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        run = interrupted(server, 4)

    other = FakeEngine(msgspec.structs.replace(DEFAULT_INFO, dtype="float16"))
    with running(engine=other, workflows=on(tmp_path)) as server:
        settled(server, run)
        ended = server.http().get(f"/v1/runs/{run}").json()
        assert (ended["status"], ended["error"]["kind"]) == ("failed", "config")
        assert "start it anew" in ended["error"]["message"]
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        assert client.post(f"/v1/runs/{run}/resume").status_code == 200
        settled(server, run)
        assert client.get(f"/v1/runs/{run}").json()["status"] == "finished"


def test_values_of_a_graph_that_the_optimiser_makes_no_more_are_forgotten(tmp_path: Path) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        run = interrupted(server, 4)
    with sqlite3.connect(tmp_path / FILE) as file:
        [(record,)] = file.execute("SELECT record FROM served_runs WHERE run = ?", (run,))
        known = file.execute("SELECT count(*) FROM workflow_tasks WHERE run = ?", (run,)).fetchone()
        other = json.loads(record) | {"executed": "another"}
        file.execute("UPDATE served_runs SET record = ? WHERE run = ?", (json.dumps(other).encode(), run))
    assert known > (0,)
    with running(auto=False, workflows=on(tmp_path)) as server:
        server.wait_until(lambda: num_calls(server.engine) > 0)
    with sqlite3.connect(tmp_path / FILE) as file:
        assert file.execute("SELECT count(*) FROM workflow_tasks WHERE run = ?", (run,)).fetchone() == (0,)


def test_a_run_of_a_model_that_is_served_elsewhere_waits(tmp_path: Path) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        run = interrupted(server, 2)
    with running(names=["another"], workflows=on(tmp_path)) as server, server.http() as client:
        assert client.get(f"/v1/runs/{run}").json()["status"] in ("queued", "running")
        assert num_calls(server.engine) == 0
    with running(workflows=on(tmp_path)) as server:
        settled(server, run)
        assert sorted(outputs(server, run)) == [0, 1, 2, 3, 4]


def test_a_run_whose_model_is_served_nowhere_can_be_cancelled_and_deleted(tmp_path: Path) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        run = interrupted(server, 2)
    with running(names=["another"], workflows=on(tmp_path)) as server, server.http() as client:
        cancelled = client.post(f"/v1/runs/{run}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert client.get(f"/v1/runs/{run}").json()["status"] == "cancelled"
        assert num_calls(server.engine) == 0
        assert client.delete(f"/v1/runs/{run}").status_code in (200, 204)
        assert client.get(f"/v1/runs/{run}").status_code == 404
        assert_nothing_left(server)


def test_a_record_that_cannot_be_read_stops_no_other_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(auto=False, workflows=on(tmp_path)) as server:
        broken, whole = interrupted(server, 1), interrupted(server, 1)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("UPDATE served_runs SET record = ? WHERE run = ?", (b'{"id": 1', broken))
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        settled(server, whole)
        listed = {each["id"]: each for each in client.get("/v1/runs").json()["data"]}
        assert {id: each["status"] for id, each in listed.items()} == {whole: "finished", broken: "failed"}
        assert listed[broken] == client.get(f"/v1/runs/{broken}").json()
        assert "cannot be read" in listed[broken]["error"]["message"]
        refused = client.post(f"/v1/runs/{broken}/resume")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_failed")
        assert client.delete(f"/v1/runs/{broken}").status_code in (200, 204)
        assert client.get(f"/v1/runs/{broken}").status_code == 404
        assert client.get(f"/v1/runs/{whole}").status_code == 200
    assert any(f"run {broken} of a workflow is not resumed" in each.message for each in caplog.records)


def test_a_key_is_known_after_a_restart(tmp_path: Path) -> None:
    key = {"idempotency-key": "k"}
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        run = start(client, CHAIN, headers=key)
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        assert start(client, CHAIN, headers=key) == run
        assert num_calls(server.engine) == 0


def test_a_full_disk_ends_a_run_which_can_be_resumed(tmp_path: Path) -> None:
    rows = [{"q": "x" * 30_000 + str(number)} for number in range(40)]
    echo = graph({"id": "t", "op": "text", "template": "{{q}}{{q}}"})
    with (
        small_disk(tmp_path / "disk", "8m") as folder,
        running(workflows=on(folder)) as server,
        server.http() as client,
    ):
        id = create(client, echo)
        filler = fill(folder, 3 << 20)
        run = client.post(f"/v1/workflows/{id}/runs", json={"rows": rows}).json()
        assert (run["status"], run["error"]["kind"]) == ("failed", "storage_failed")
        assert "the disk is full" in run["error"]["message"]
        assert run["workflow"]["done"] < 40
        assert client.get(f"/v1/runs/{run['id']}").json()["status"] == "failed"
        refused = client.post(f"/v1/workflows/{id}/runs", json={"rows": rows})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_failed")
        filler.unlink()
        assert client.post(f"/v1/runs/{run['id']}/resume").status_code == 200
        settled(server, run["id"])
        ended = client.get(f"/v1/runs/{run['id']}").json()
        assert (ended["status"], ended["workflow"]["done"]) == ("finished", 40)
        assert outputs(server, run["id"]) == {number: 2 * row["q"] for number, row in enumerate(rows)}
