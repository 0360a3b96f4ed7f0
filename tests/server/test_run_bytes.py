"""What runs of a tenant may store (`workflows.max_run_bytes`), counted while they grow."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.conftest import running
from tests.server.test_workflow_runs import assert_nothing_left, create, events, start
from tests.workflow.shapes import Json, body, graph, llm, switch, text
from weft.config import WorkflowsConfig
from weft.workflow.service import explained, inputs
from weft.workflow.service.service import WorkflowService

ECHO = graph(text("t", "<{{q}}>"))
LONG = graph(text("t", "y" * 200 + "{{q}}"))
"""60 rows of one character are about 600 bytes as inputs, and 14,000 as results."""
MAX_BYTES = 20_000
ROWS = [{"q": f"{number:03}" + "x" * 100} for number in range(60)]
"""About 7,000 bytes as inputs, and 9,000 as results."""


def limited(max_bytes: int = MAX_BYTES) -> Any:
    return partial(WorkflowService, config=WorkflowsConfig(max_run_bytes=max_bytes))


def results_of(client: httpx.Client, run: str) -> list[Json]:
    return client.get(f"/v1/runs/{run}/results", params={"limit": 1000}).json()["data"]


def test_a_run_ends_where_its_results_grow_past_the_limit_and_goes_on_when_there_is_room() -> None:
    with running(workflows=limited()) as server, server.http() as client:
        first = start(client, ECHO, ROWS)
        assert first["status"] == "finished"
        second = start(client, ECHO, [*ROWS[:40], {"q": "last"}])
        assert (second["status"], second["error"]["kind"]) == ("failed", "quota_exceeded")
        message = second["error"]["message"]
        assert "20,000" in message
        assert "workflows.max_run_bytes" in message
        there = results_of(client, second["id"])
        assert 0 < len(there) < 41
        assert second["workflow"]["done"] == len(there)

        client.delete(f"/v1/runs/{first['id']}")
        client.post(f"/v1/runs/{second['id']}/resume")
        server.wait_until(lambda: not server.service.workflows.runs.num_running)
        ended = client.get(f"/v1/runs/{second['id']}").json()
        assert (ended["status"], ended["workflow"]["done"]) == ("finished", 41)
        found = results_of(client, second["id"])
        assert found[: len(there)] == there
        assert sorted(each["row"] for each in found) == list(range(41))
        assert len({each["number"] for each in found}) == 41
        assert_nothing_left(server)


def test_calls_of_a_row_whose_result_had_no_room_count_once_after_a_resume() -> None:
    wait = body({"id": "person", "op": "external"}, llm("late", "{{person}}", max_tokens=2), v="late")
    now = body(llm("a", "{{text}}", max_tokens=2), text("n", "{{a}}" + "{{text}}" * 8), v="n")
    raw = graph(switch("s", "q", wait=wait, now=now), outputs={"out": "s.v"}, inputs=["q", "text"])
    rows = [{"q": "now", "text": "x"}, {"q": "now", "text": "x" * 400}, {"q": "wait", "text": "x"}]
    with running(workflows=limited(6_000)) as server, server.http() as client:
        workflows, filler = server.service.workflows, start(client, ECHO, [{"q": "x" * 1_600}])["id"]
        run = start(client, raw, rows, background=True, limits={"calls": 3}, cache=False)["id"]
        server.wait_until(lambda: not workflows.runs.num_running)
        assert client.get(f"/v1/runs/{run}").json()["error"]["kind"] == "quota_exceeded"
        client.delete(f"/v1/runs/{filler}")
        client.post(f"/v1/runs/{run}/resume")
        server.wait_until(lambda: len(workflows.variables.by_id) == 1)
        client.put(f"/v1/variables/{next(iter(workflows.variables.by_id))}", json={"value": 1})
        server.wait_until(lambda: not workflows.runs.num_running)
        ended = client.get(f"/v1/runs/{run}").json()["workflow"]
        assert (ended["done"], ended["failed"], ended["calls"]["calls"]) == (3, 0, 3)


def test_numbers_of_results_have_no_gap_where_one_had_no_room() -> None:
    wait = body({"id": "person", "op": "external"}, text("w", "{{person}}"), v="w")
    raw = graph(switch("s", "q", wait=wait, now=body(text("n", "{{text}}" * 8), v="n")), inputs=["q", "text"])
    raw["outputs"] = {"out": "s.v"}
    rows = [{"q": q, "text": text} for q, text in (("now", "x"), ("now", "x" * 400), ("now", "x"), ("wait", "x"))]
    with running(workflows=limited(6_000)) as server, server.http() as client:
        workflows, filler = server.service.workflows, start(client, ECHO, [{"q": "x" * 1_700}])["id"]
        run = start(client, raw, rows, background=True)["id"]
        server.wait_until(lambda: not workflows.runs.num_running)
        assert [(each["number"], each["row"]) for each in results_of(client, run)] == [(1, 0), (2, 2)]
        client.delete(f"/v1/runs/{filler}")
        client.post(f"/v1/runs/{run}/resume")
        server.wait_until(lambda: len(workflows.variables.by_id) == 1)
        client.put(f"/v1/variables/{next(iter(workflows.variables.by_id))}", json={"value": 1})
        told = [event["row"] for _, event in events(client.get(f"/v1/runs/{run}/events").text) if event.get("row")]
        assert [(each["number"], each["row"]) for each in told] == [(1, 0), (2, 2), (3, 1), (4, 3)]
        page = client.get(f"/v1/runs/{run}/results", params={"limit": 3}).json()
        assert (page["last"], page["has_more"]) == (3, True)


def test_runs_at_once_count_together_and_those_of_other_tenants_apart() -> None:
    keys = {"api_keys": ["alice=a", "bob=b"]}
    with running(workflows=limited(), **keys) as server, server.http() as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
        rows = [{"q": "x"}] * 60
        ids = [start(client, LONG, rows, headers=alice, background=True)["id"] for _ in range(2)]
        assert start(client, LONG, rows, headers=bob)["status"] == "finished"
        runs = server.service.workflows.runs
        server.wait_until(lambda: not runs.num_running and not runs.num_waiting)
        client.headers.update(alice)
        cards = [client.get(f"/v1/runs/{id}").json() for id in ids]
        assert "quota_exceeded" in [card["error"] and card["error"]["kind"] for card in cards]
        stored = sum(each.size_bytes for each in runs._tables.runs.all("alice"))
        kept = [results_of(client, id) for id in ids]
        assert stored <= MAX_BYTES
        assert stored > sum(len(each["outputs"]["out"]) for page in kept for each in page)
        assert_nothing_left(server)


def test_what_a_run_stores_is_counted_as_its_rows_are_written() -> None:
    with running(workflows=limited()) as server, server.http() as client:
        run = start(client, ECHO, ROWS)["id"]
        tables = server.service.workflows.runs._tables.runs
        [stored] = tables.all("")
        inputs = sum(len(f'{{"q":"{row["q"]}"}}') + 1 for row in ROWS) + 1
        results = sum(
            len(f'{{"row":{each["row"]},"outputs":{{"out":"{each["outputs"]["out"]}"}}}}')
            for each in results_of(client, run)
        )
        assert stored.size_bytes == inputs + results


def test_no_run_begins_past_the_limit() -> None:
    with running(workflows=limited(1000)) as server, server.http() as client:
        response = client.post(f"/v1/workflows/{create(client, ECHO)}/runs", json={"rows": ROWS})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "quota_exceeded")


def test_an_explanation_reads_so_many_bytes_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "MAX_EXPLAINED_BYTES", 2_000)
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 1_000)
    with running() as server, server.http() as client:
        run = start(client, ECHO, ROWS)["id"]
        table, read = server.service.workflows.runs._tables.runs, list[int]()
        find = table.inputs
        monkeypatch.setattr(table, "inputs", lambda *given: read.append(given[1]) or find(*given))
        made = client.get(f"/v1/runs/{run}/explain").json()
        assert made["why_no_plan"] == "its rows have more than 2,000 bytes"
        assert (made["rows"]["done"], len(read)) == (60, 2)
        few = start(client, ECHO, ROWS[:5])["id"]
        assert client.get(f"/v1/runs/{few}/explain").json()["predicted"]["calls"] == 0
