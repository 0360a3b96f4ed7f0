"""Values from outside that runs of workflows on a server wait for: set once, checked, kept over a restart."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_restart import on, outputs, settled
from tests.server.test_workflow_runs import ALICE, BOB, ROWS, assert_nothing_left, create, events, start
from tests.workflow.shapes import Json, function, graph, llm, text
from weft.store.database import FILE
from weft.store.workflow_variables import AskedVariable, WorkflowVariableTable
from weft.workflow.service.run_variables import MAX_ASKING

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
PERSON = graph({"id": "person", "op": "external", "schema": SCHEMA}, text("t", "{{q}} {{person.ok}}"))


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(api_keys=["alice=a", "bob=b"]) as server:
        yield server
        assert_nothing_left(server)


def waits(server: RunningServer, client: httpx.Client, run: str, count: int) -> list[Json]:
    """What a run waits for, once that are so many values."""
    server.wait_until(lambda: len(server.service.workflows.variables.by_id) == count)
    shown = client.get(f"/v1/runs/{run}").json()["workflow"]
    assert shown["num_waits"] == count
    return sorted(shown["waits_for"], key=lambda wait: wait["row"])


def put(client: httpx.Client, id: str, **given: object) -> httpx.Response:
    return client.put(f"/v1/variables/{id}", json=given)


def test_a_person_decides(server: RunningServer) -> None:
    with server.http(headers=ALICE) as client:
        run = start(client, PERSON, ROWS[:3], background=True)["id"]
        waiting = waits(server, client, run, 3)
        assert [(wait["row"], wait["node"], wait["schema"]) for wait in waiting] == [
            (n, "person", SCHEMA) for n in range(3)
        ]
        first, second, third = (wait["id"] for wait in waiting)
        given = put(client, first, value={"ok": True}).json()
        assert (given["id"], given["status"]) == (first, "ready")
        again = put(client, first, value={"ok": False})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "not_settable")
        wrong = put(client, second, value={"ok": "yes"})
        assert (wrong.status_code, "ok is not of type boolean" in wrong.json()["error"]["message"]) == (400, True)
        assert len(waits(server, client, run, 2)) == 2
        assert put(client, second, value={"ok": False}).status_code == 200
        assert put(client, third, error="nobody is there").status_code == 200
        settled_run = events(client.get(f"/v1/runs/{run}/events").text)[-1][1]["run"]
        assert settled_run["workflow"]["num_waits"] == 0
        rows = {each["row"]: each for each in client.get(f"/v1/runs/{run}/results").json()["data"]}
        assert [rows[row]["outputs"] for row in range(3)] == [{"out": "0 true"}, {"out": "1 false"}, {}]
        error = rows[2]["error"]
        assert (error["node"], error["kind"], error["message"]) == ("person", "external", "nobody is there")
        # After the end too: set is set.
        assert put(client, third, value={"ok": True}).status_code == 409


def test_a_run_that_asks_for_many_values_does_not_delay_other_tenants(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflows = server.service.workflows
    table, began, go = workflows.variables.table, threading.Semaphore(0), threading.Event()

    def held(*args: Any) -> AskedVariable:
        began.release()
        assert go.wait(60)
        return WorkflowVariableTable.ask(table, *args)

    monkeypatch.setattr(table, "ask", held)
    with server.http(headers=ALICE) as client, server.http(headers=BOB) as bob:
        theirs = create(bob, PERSON)
        run = start(client, PERSON, [{"q": "x"}] * 200, background=True)["id"]
        for _ in range(4):  # as many as one tenant has threads
            assert began.acquire(timeout=60)
        try:
            assert bob.get(f"/v1/workflows/{theirs}").status_code == 200
            assert bob.get("/v1/runs/wrun-0").status_code == 404
            assert server.on_loop(lambda: len(workflows.variables.table_threads._queue)) <= MAX_ASKING - 4
            client.post(f"/v1/runs/{run}/cancel")
        finally:
            go.set()
        again = start(client, PERSON, ROWS[:1], background=True)["id"]
        (wait,) = waits(server, client, again, 1)
        assert put(client, wait["id"], value={"ok": True}).status_code == 200
        client.get(f"/v1/runs/{again}/events")


def test_who_may_set_what(server: RunningServer) -> None:
    with server.http(headers=ALICE) as client, server.http(headers=BOB) as bob:
        run = start(client, PERSON, ROWS[:1], background=True)["id"]
        (wait,) = waits(server, client, run, 1)
        assert put(bob, wait["id"], value={"ok": True}).status_code == 404
        for id in ("wvar-0", wait["id"] + "0"):
            missing = put(client, id, value={"ok": True})
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "variable_not_found")
        for given in ({}, {"value": {"ok": True}, "error": "x"}, {"value": {"ok": True}, "kind": "x"}, {"valeu": 1}):
            assert put(client, wait["id"], **given).status_code == 400
        assert client.get(f"/v1/variables/{wait['id']}").status_code == 400
        client.post(f"/v1/runs/{run}/cancel")
        over = put(client, wait["id"], value={"ok": True})
        assert (over.status_code, over.json()["error"]["code"]) == (410, "no_value")
        assert put(bob, wait["id"], value={"ok": True}).status_code == 404


def test_a_value_that_comes_before_its_run_goes_on_is_to_be_sent_again(server: RunningServer) -> None:
    """As after a restart, while the server waits for its engines."""
    with server.http(headers=ALICE) as client, server.http(headers=BOB) as bob:
        run = start(client, PERSON, ROWS[:1], background=True)["id"]
        (wait,) = waits(server, client, run, 1)
        variables = server.service.workflows.variables
        waiting = variables.by_id.pop(wait["id"])
        early = put(client, wait["id"], value={"ok": True})
        assert (early.status_code, early.json()["error"]["code"]) == (429, "overloaded")
        assert "send it again" in early.json()["error"]["message"]
        assert int(early.headers["retry-after"]) > 0
        assert put(bob, wait["id"], value={"ok": True}).status_code == 404
        variables.by_id[wait["id"]] = waiting
        assert put(client, wait["id"], value={"ok": True}).status_code == 200
        events(client.get(f"/v1/runs/{run}/events").text)


def test_an_attempt_that_was_followed_by_another_needs_no_value(server: RunningServer) -> None:
    raw = graph(function("f", "mine", x="{{q}}"), text("t", "<{{f}}>"))
    raw["nodes"][0]["retries"] = 1
    table = server.service.workflows.variables.table
    with server.http(headers=ALICE) as client:
        run = start(client, raw, ROWS[:1], background=True, functions=["mine"])["id"]
        (first,) = waits(server, client, run, 1)
        assert table.find("alice", first["id"]) == (run, False, False)
        table.ask("wvar-later", run, 0, "f", 2, 0.0)
        assert table.find("alice", first["id"]) == (run, False, True)
        assert table.find("bob", first["id"]) is None
        client.post(f"/v1/runs/{run}/cancel")


def test_progress_is_told_while_a_row_waits(server: RunningServer) -> None:
    raw = graph(llm("answer", "Tell {{q}}."), {"id": "person", "op": "external"}, text("t", "{{answer}} {{person}}"))
    with server.http(headers=ALICE) as client:
        run = start(client, raw, ROWS[:1], background=True)["id"]
        (wait,) = waits(server, client, run, 1)
        live = server.service.workflows.runs._live[run]
        server.wait_until(lambda: live.record.counts.calls.calls == 1)
        shown = client.get(f"/v1/runs/{run}").json()["workflow"]
        assert (shown["calls"]["calls"], shown["by_node"]["answer"]["calls"], shown["done"]) == (1, 1, 0)
        assert put(client, wait["id"], value="yes").status_code == 200
        events(client.get(f"/v1/runs/{run}/events").text)


def test_null_is_a_value(server: RunningServer) -> None:
    with server.http(headers=ALICE) as client:
        run = start(client, graph({"id": "any", "op": "external"}), ROWS[:1], background=True)["id"]
        (wait,) = waits(server, client, run, 1)
        assert put(client, wait["id"], value=None).status_code == 200
        events(client.get(f"/v1/runs/{run}/events").text)
        assert client.get(f"/v1/runs/{run}/results").json()["data"][0]["outputs"] == {"out": None}


def test_a_value_that_does_not_come_in_time(server: RunningServer) -> None:
    with server.http(headers=ALICE) as client:
        run = start(client, graph({"id": "late", "op": "external", "timeout_s": 0.01}), ROWS[:1])
        error = run["results"]["data"][0]["error"]
        assert (error["node"], error["message"]) == ("late", "no value came within 0.01 s")


def test_schemas_that_cannot_be_checked_are_refused(server: RunningServer) -> None:
    with server.http(headers=ALICE) as client:
        raw = graph({"id": "person", "op": "external", "schema": {"dependentRequired": {}}})
        refused = client.post(f"/v1/workflows/{create(client, raw)}/runs", json={"rows": ROWS})
        assert refused.status_code == 400
        assert "person: values from outside are not checked against dependentRequired" in refused.text


def test_functions_of_the_client_are_variables(server: RunningServer) -> None:
    raw = graph(function("f", "mine", x="{{q}}"), text("t", "<{{f}}>"))
    raw["nodes"][0]["retries"] = 1
    with server.http(headers=ALICE) as client:
        run = start(client, raw, ROWS[:1], background=True, functions=["mine"])["id"]
        (wait,) = waits(server, client, run, 1)
        assert (wait["function"], "args" in wait) == ("mine", False)
        with client.stream("GET", f"/v1/runs/{run}/events") as stream:
            told = next(line for line in stream.iter_lines() if '"wait"' in line)
        assert '"function":"mine","args":{"x":"0"}' in told
        assert put(client, wait["id"], error="once more", kind="ValueError").status_code == 200
        server.wait_until(lambda: {wait["id"]} != set(server.service.workflows.variables.by_id) != set())
        (again,) = waits(server, client, run, 1)
        assert again["id"] != wait["id"]
        assert put(client, again["id"], value="done").status_code == 200
        events(client.get(f"/v1/runs/{run}/events").text)
        assert client.get(f"/v1/runs/{run}/results").json()["data"][0]["outputs"] == {"out": "<done>"}
        refused = client.post(
            f"/v1/workflows/{create(client, raw)}/runs", json={"rows": ROWS, "functions": ["mine", "other"]}
        )
        assert (refused.status_code, "no node calls 'other'" in refused.text) == (400, True)


def test_the_end_of_a_row_leaves_no_value_behind_but_that_it_was_set(tmp_path: Path) -> None:
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        run = start(client, PERSON, ROWS[:2], background=True)["id"]
        ended, other = (wait["id"] for wait in waits(server, client, run, 2))
        assert put(client, ended, value={"ok": True}).status_code == 200
        live = server.service.workflows.runs._live[run]
        server.wait_until(lambda: live.record.counts.rows == 1)
        with sqlite3.connect(tmp_path / FILE) as database:
            kept = dict(database.execute("SELECT id, answer FROM workflow_variables").fetchall())
        assert kept == {ended: b"", other: None}
        assert put(client, ended, value={"ok": False}).status_code == 409
        client.post(f"/v1/runs/{run}/cancel")


def test_a_value_that_does_not_come_in_time_after_a_restart(tmp_path: Path) -> None:
    late = graph({"id": "late", "op": "external", "timeout_s": 1000})
    with running(workflows=on(tmp_path / "data")) as server, server.http() as client:
        run = start(client, late, ROWS[:1], background=True)["id"]
        (wait,) = waits(server, client, run, 1)
        (tmp_path / "killed").mkdir()
        with sqlite3.connect(tmp_path / "data" / FILE) as source:
            (tmp_path / "killed" / FILE).write_bytes(source.serialize())
        client.post(f"/v1/runs/{run}/cancel")
    with sqlite3.connect(tmp_path / "killed" / FILE) as killed:
        killed.execute("UPDATE workflow_variables SET asked_s = asked_s - 2000")
    with running(workflows=on(tmp_path / "killed")) as server, server.http() as client:
        settled(server, run)
        error = client.get(f"/v1/runs/{run}/results").json()["data"][0]["error"]
        assert (error["node"], error["message"]) == ("late", "no value came within 1000 s")
        assert put(client, wait["id"], value=1).status_code == 410


def test_values_are_there_after_the_server_was_killed(tmp_path: Path) -> None:
    two = graph(
        {"id": "one", "op": "external"},
        {"id": "two", "op": "external", "timeout_s": 1000},
        text("t", "{{one}} {{two}}"),
    )
    with running(workflows=on(tmp_path / "data")) as server, server.http() as client:
        run = start(client, two, ROWS[:1], background=True)["id"]
        waiting = {wait["node"]: wait for wait in waits(server, client, run, 2)}
        assert put(client, waiting["one"]["id"], value="first").status_code == 200
        (tmp_path / "killed").mkdir()
        with sqlite3.connect(tmp_path / "data" / FILE) as source:
            (tmp_path / "killed" / FILE).write_bytes(source.serialize())
        client.post(f"/v1/runs/{run}/cancel")
    with running(workflows=on(tmp_path / "killed")) as server, server.http() as client:
        (wait,) = waits(server, client, run, 1)
        # The same variable, whose time began when it was first asked for.
        assert wait == waiting["two"]
        assert put(client, waiting["one"]["id"], value="other").status_code == 409
        assert put(client, wait["id"], value="second").status_code == 200
        settled(server, run)
        assert outputs(server, run) == {0: "first second"}


def test_the_used_seconds_of_a_run_are_kept_over_a_restart(tmp_path: Path) -> None:
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        run = start(client, PERSON, ROWS[:2], limits={"seconds": 1e6}, background=True)["id"]
        unlimited = start(client, PERSON, ROWS[:1], background=True)["id"]
        server.wait_until(lambda: len(server.service.workflows.variables.by_id) == 3)
    with sqlite3.connect(tmp_path / FILE) as database:
        ((kept, seconds),) = database.execute("SELECT run, seconds FROM workflow_seconds")
        assert (kept, 0 < seconds < 1e6) == (run, True)
        database.execute("UPDATE workflow_seconds SET seconds = 1e6")
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        settled(server, run)
        rows = client.get(f"/v1/runs/{run}/results").json()["data"]
        assert [row["error"]["kind"] for row in rows] == ["limit_exceeded"] * 2
        waits(server, client, unlimited, 1)
        client.post(f"/v1/runs/{unlimited}/cancel")
        assert client.delete(f"/v1/runs/{run}").status_code == 200
    with sqlite3.connect(tmp_path / FILE) as database:
        assert database.execute("SELECT COUNT(*) FROM workflow_seconds").fetchone() == (0,)
