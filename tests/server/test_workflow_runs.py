"""Runs of workflows over HTTP: results, events, idempotency, cancelling, tenants, clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.server.conftest import RunningServer, ids, running
from tests.server.test_disconnect import connect, head_of
from tests.workflow.shapes import Json, function, graph, llm, mapped, text
from tests.workflow.shapes import body as body_of
from weft.abi.errors import InvalidRequest
from weft.config import WorkflowsConfig
from weft.server import workflow_events
from weft.store.database import Database
from weft.store.served_runs import NumberedResult
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine
from weft.workflow.run.clock import RunClock
from weft.workflow.run.planning import RunPlanner
from weft.workflow.service.execution import RunExecution
from weft.workflow.service.live_run import WorkflowRun
from weft.workflow.service.service import WorkflowService

ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in "ab")
ASK = graph(llm("a", "Say {{q}}", max_tokens=3), llm("b", "Again {{a}}", max_tokens=2))
PLAIN = graph(text("t", "<{{q}}>"))
ROWS = [{"q": str(number)} for number in range(5)]


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(api_keys=["alice=a", "bob=b"]) as server:
        yield server


@pytest.fixture
def client(shared: RunningServer) -> Iterator[httpx.Client]:
    with shared.http(headers=ALICE) as client:
        yield client
    assert_nothing_left(shared)


def assert_nothing_left(server: RunningServer) -> None:
    server.wait_until(lambda: not server.service.workflows.runs.num_running)
    server.assert_nothing_left()


def create(client: httpx.Client, raw: Json, headers: dict[str, str] | None = None) -> str:
    response = client.post("/v1/workflows", json={"graph": raw}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["id"]


def start(client: httpx.Client, raw: Json, rows: list[Json] | None = None, **fields: Any) -> Json:
    headers = fields.pop("headers", None)
    asked = {"rows": ROWS if rows is None else rows, **fields}
    response = client.post(f"/v1/workflows/{create(client, raw, headers)}/runs", json=asked, headers=headers)
    assert response.status_code == (202 if fields.get("background") else 200), response.text
    return response.json()


def events(text: str) -> list[tuple[int, Json]]:
    """(id, event) of each."""
    assert text.endswith("data: [DONE]\n\n")
    found = []
    for part in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        number, data = part.split("\n")
        found.append((int(number.removeprefix("id: ")), json.loads(data.removeprefix("data: "))))
    return found


def test_a_run_and_its_results(client: httpx.Client) -> None:
    run = start(client, ASK)
    assert (run["status"], run["kind"], run["model"], run["error"]) == ("finished", "workflow", "fake-model", None)
    progress = run["workflow"]
    assert (progress["rows"], progress["done"], progress["failed"]) == (5, 5, 0)
    assert progress["calls"]["calls"] == 10
    assert {name: each["calls"] for name, each in progress["by_node"].items()} == {"a": 5, "b": 5}
    assert run["usage"]["generated_tokens"] == progress["calls"]["output_tokens"] == 25
    results = run["results"]
    assert [each["number"] for each in results["data"]] == [1, 2, 3, 4, 5]
    assert sorted(each["row"] for each in results["data"]) == [0, 1, 2, 3, 4]
    assert all(len(each["outputs"]["out"]) == 2 for each in results["data"])
    assert (results["last"], results["has_more"], results["status"]) == (5, False, "finished")
    assert client.get(f"/v1/runs/{run['id']}").json() == run | {"results": None}
    listed = client.get("/v1/runs").json()["data"][0]
    assert listed == run | {"results": None, "workflow": progress | {"by_node": {}}}

    first = client.get(f"/v1/runs/{run['id']}/results", params={"limit": 2}).json()
    assert (first["last"], first["has_more"]) == (2, True)
    rest = client.get(f"/v1/runs/{run['id']}/results", params={"after": 2}).json()
    assert first["data"] + rest["data"] == results["data"]
    beyond = client.get(f"/v1/runs/{run['id']}/results", params={"after": 9}).json()
    assert (beyond["data"], beyond["last"], beyond["has_more"]) == ([], 9, False)
    cancelled = client.post(f"/v1/runs/{run['id']}/cancel").json()
    assert cancelled["status"] == "finished"
    assert client.delete(f"/v1/runs/{run['id']}").json() == {"object": "run.deleted", "id": run["id"]}
    assert client.get(f"/v1/runs/{run['id']}").status_code == 404
    assert client.get(f"/v1/runs/{run['id']}/results").status_code == 404


def test_calls_run_in_the_order_of_plans(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    planners: list[RunPlanner] = []

    class Noted(RunPlanner):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            planners.append(self)

    monkeypatch.setattr("weft.workflow.service.execution.RunPlanner", Noted)
    start(client, ASK)
    (planner,) = planners
    assert planner.failure is None
    assert planner.rounds.num_plans > 0


def test_bodies_of_lines(client: httpx.Client) -> None:
    id = create(client, PLAIN)
    lines = b'{"q": "a", "unused": 1}\r\n\n{"q": "b"}'
    for kind in ("application/jsonl", "application/x-ndjson; charset=utf-8"):
        headers = {"content-type": kind}
        address = f'/v1/workflows/{id}/runs?limits={{"calls": 1}}&cache=false'
        run = client.post(address, content=lines, headers=headers).json()
        assert [each["outputs"] for each in run["results"]["data"]] == [{"out": "<a>"}, {"out": "<b>"}]
        assert run["workflow"]["limits"] == {"calls": 1, "tokens": None, "seconds": None}
    for query, param in (
        ("rows=[]", "rows"),
        ("cache=1&cache=2", "cache"),
        ("cash=true", "cash"),
        ("cache=7", "cache"),
    ):
        refused = client.post(f"/v1/workflows/{id}/runs?{query}", content=lines, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = client.post(f"/v1/workflows/{id}/runs", content=b'{"q": 1}\nx\n{', headers=headers).json()["error"]
    assert [each["place"] for each in refused["mistakes"]] == ["line 2", "line 3"]


def test_a_failed_row_is_one_entry(client: httpx.Client) -> None:
    raw = graph(function("parts", "split", text="{{q}}", max_tokens="{{n}}"), inputs=["q", "n"])
    run = start(client, raw, [{"q": "abc", "n": 2}, {"q": "abc", "n": 0}])
    assert (run["status"], run["workflow"]["done"], run["workflow"]["failed"]) == ("finished", 2, 1)
    by_row = {each["row"]: each for each in run["results"]["data"]}
    assert by_row[0]["outputs"] == {"out": ["ab", "c"]}
    assert by_row[1]["outputs"] == {}
    assert (by_row[1]["error"]["node"], by_row[1]["error"]["row"]) == ("parts", 1)


def test_limits_of_a_run(client: httpx.Client) -> None:
    run = start(client, ASK, limits={"calls": 3})
    assert run["workflow"]["calls"]["calls"] == 3
    kinds = [each["error"]["kind"] for each in run["results"]["data"] if "error" in each]
    assert set(kinds) == {"limit_exceeded"}
    assert len(kinds) >= 3


def test_equal_calls_have_the_earlier_answer(client: httpx.Client) -> None:
    raw = graph(llm("a", "Once {{q}}", max_tokens=3, temperature=0))
    first = start(client, raw)
    again = start(client, raw)
    assert [run["workflow"]["calls"]["cached_calls"] for run in (first, again)] == [0, 5]
    outputs = [{each["row"]: each["outputs"] for each in run["results"]["data"]} for run in (first, again)]
    assert outputs[0] == outputs[1]
    for fields in ({"cache": False}, {"cache_salt": "x"}, {"headers": BOB}):
        assert start(client, raw, **fields)["workflow"]["calls"]["cached_calls"] == 0


def test_equal_calls_of_runs_at_the_same_time_are_made_once(client: httpx.Client) -> None:
    raw = graph(llm("a", "Two runs ask {{q}}", max_tokens=8, temperature=0))
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: start(client, raw), range(2)))
        theirs = start(client, raw, headers=BOB)["workflow"]["calls"]
    calls = [run["workflow"]["calls"] for run in both]
    assert sum(each["calls"] for each in calls) == sum(each["cached_calls"] for each in calls) == len(ROWS)
    outputs = [{each["row"]: each["outputs"] for each in run["results"]["data"]} for run in both]
    assert outputs[0] == outputs[1]
    assert (theirs["calls"], theirs["cached_calls"]) == (len(ROWS), 0), "another tenant"


def test_calls_in_progress_are_cancelled_when_the_seconds_of_a_run_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[RunClock] = []
    begin = RunClock.start

    def noted(clock: RunClock) -> None:
        clocks.append(clock)
        begin(clock)

    monkeypatch.setattr(RunClock, "start", noted)
    with running(auto=False) as server, server.http() as client:
        run = start(client, ASK, limits={"seconds": 1e6}, background=True)["id"]
        server.wait_until(lambda: len(server.engine.sequences) == 5)
        server.on_loop(clocks[0]._on_time_over)
        ended = events(client.get(f"/v1/runs/{run}/events").text)[-1][1]["run"]
        assert (ended["status"], ended["workflow"]["failed"]) == ("finished", 5)
        assert ended["workflow"]["limits"] == {"calls": None, "tokens": None, "seconds": 1e6}
        for row in client.get(f"/v1/runs/{run}/results").json()["data"]:
            assert (row["error"]["node"], row["error"]["kind"]) == ("a", "limit_exceeded")
            assert row["error"]["message"] == "the run has taken the 1,000,000 seconds that it may take"
        assert_nothing_left(server)


REFUSED: list[tuple[Json, Json, str]] = [
    (PLAIN, {"rows": []}, "no rows"),
    (PLAIN, {"rows": [{"p": 1}]}, "there is no column 'q'"),
    (PLAIN, {"rows": [1]}, "rows[0]"),
    (PLAIN, {"rows": ROWS, "limits": {"cals": 1}}, "limits.cals"),
    (PLAIN, {"rows": ROWS, "limits": {"calls": -1}}, "limits"),
    *((PLAIN, {"rows": ROWS, "limits": {"seconds": bad}}, "limits: Expected `float") for bad in (0, -1, True, "5")),
    (PLAIN, {"rows": ROWS, "stream": True, "background": True}, "exclude"),
    (ASK, {"rows": ROWS, "model": "other"}, "'other' is not served"),
    (graph(llm("a", "x", model="no")), {"rows": ROWS}, "a.model: The model 'no'"),
    (graph(function("f", "mine", x="{{q}}")), {"rows": ROWS}, "f: 'mine' is a Python function"),
]


@pytest.mark.parametrize(("raw", "asked", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_run_is_refused_before_it_runs(client: httpx.Client, raw: Json, asked: Json, message: str) -> None:
    before = client.get("/v1/runs").json()["data"]
    refused = client.post(f"/v1/workflows/{create(client, raw)}/runs", json=asked)
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]
    assert client.get("/v1/runs").json()["data"] == before


def test_all_nodes_that_cannot_run_are_named(client: httpx.Client) -> None:
    inside = body_of(function("f", "mine", x="{{i}}"), v="f")
    raw = graph(mapped("m", "q", inside), function("g", "other", x="{{m}}"), llm("a", "{{g}}", model="no"))
    refused = client.post(f"/v1/workflows/{create(client, raw)}/runs", json={"rows": ROWS}).json()["error"]
    assert [each["place"] for each in refused["mistakes"]] == ["m.f", "g", "a.model"]


def test_paths_of_other_runs(client: httpx.Client) -> None:
    run = start(client, PLAIN)["id"]
    for path in (f"/v1/runs/{run}/logs", f"/v1/runs/{run}/messages", "/v1/runs/run-x/events", "/v1/runs/run-x/results"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "run")
    assert client.post(f"/v1/runs/{run}/messages", json={"message": 1}).status_code == 400
    for path in (f"results?after={-1}", "results?after=x", "results?limit=0", "results?limit=1001", "events?after=1e3"):
        assert client.get(f"/v1/runs/{run}/{path}").status_code == 400
    assert client.get("/v1/runs/wrun-0/events").status_code == 404
    assert (
        client.post("/v1/workflows/00000000/runs", json={"rows": ROWS}).json()["error"]["code"] == "workflow_not_found"
    )
    resumed = client.post(f"/v1/runs/{run}/resume")
    assert (resumed.status_code, "is finished" in resumed.json()["error"]["message"]) == (400, True)


def test_tenants_do_not_see_each_others_runs(shared: RunningServer, client: httpx.Client) -> None:
    run = start(client, PLAIN)["id"]
    with shared.http(headers=BOB) as bob:
        for path in ("", "/events", "/results"):
            assert bob.get(f"/v1/runs/{run}{path}").status_code == 404
        for path in ("cancel", "resume"):
            assert bob.post(f"/v1/runs/{run}/{path}").status_code == 404
        assert bob.delete(f"/v1/runs/{run}").status_code == 404
        assert run not in [each["id"] for each in bob.get("/v1/runs").json()["data"]]
        mine = create(client, graph(text("t", "only mine {{q}}")))
        assert bob.post(f"/v1/workflows/{mine}/runs", json={"rows": ROWS}).status_code == 404


# ---- events


def test_a_stream_and_where_it_goes_on(client: httpx.Client) -> None:
    id = create(client, ASK)
    sent = client.post(f"/v1/workflows/{id}/runs", json={"rows": ROWS, "stream": True})
    assert sent.headers["content-type"].startswith("text/event-stream")
    all_events = events(sent.text)
    assert [event["type"] for _, event in all_events if event["type"] != "progress"] == ["run", *["row"] * 5, "end"]
    numbers = [number for number, _ in all_events]
    assert numbers == sorted(numbers)
    run = all_events[-1][1]["run"]
    assert (run["status"], run["workflow"]["done"]) == ("finished", 5)
    rows = [(number, event["row"]) for number, event in all_events if event["type"] == "row"]
    assert [number for number, _ in rows] == [row["number"] for _, row in rows] == [1, 2, 3, 4, 5]
    assert client.get(f"/v1/runs/{run['id']}/results").json()["data"] == [row for _, row in rows]
    for headers, query in (({"last-event-id": "3"}, ""), ({}, "?after=3"), ({"last-event-id": "3"}, "?after=1")):
        again = events(client.get(f"/v1/runs/{run['id']}/events{query}", headers=headers).text)
        assert [event["row"] for _, event in again if event["type"] == "row"] == [row for _, row in rows[3:]]
        assert again[-1][1] == {"type": "end", "run": run}


def test_results_are_there_while_it_runs() -> None:
    with running(auto=False) as server, server.http() as client, ThreadPoolExecutor() as pool:
        run = start(client, graph(llm("a", "{{q}}", max_tokens=8)), ROWS[:2], background=True)["id"]
        server.wait_until(lambda: len(server.engine.sequences) == 2)
        shown = client.get(f"/v1/runs/{run}").json()
        assert (shown["status"], shown["workflow"]["done"]) == ("running", 0)
        assert client.delete(f"/v1/runs/{run}").status_code == 400
        stream = pool.submit(lambda: client.get(f"/v1/runs/{run}/events").text)
        server.on_loop(lambda: server.engine.step(12))
        server.wait_until(lambda: not server.engine.sequences)
        assert [event["type"] for _, event in events(stream.result(60))][-1] == "end"
        assert_nothing_left(server)


def test_a_large_run_is_read_in_pages(client: httpx.Client) -> None:
    rows = [{"q": str(number)} for number in range(2500)]
    run = start(client, PLAIN, rows)
    assert len(run["results"]["data"]) == 1000
    found, after = [], 0
    while True:
        page = client.get(f"/v1/runs/{run['id']}/results", params={"after": after, "limit": 700}).json()
        found += page["data"]
        after = page["last"]
        if not page["has_more"]:
            break
    assert {each["row"]: each["outputs"]["out"] for each in found} == {n: f"<{n}>" for n in range(2500)}
    streamed = events(client.get(f"/v1/runs/{run['id']}/events").text)
    assert [event["row"] for _, event in streamed if event["type"] == "row"] == found


def test_a_run_that_is_deleted_under_its_reader_ends_the_stream_with_an_error(
    shared: RunningServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, PLAIN)["id"]
    runs = shared.service.workflows.runs
    results = runs.results

    async def deleted_after_the_first_page(run: WorkflowRun, after: int, limit: int) -> list[NumberedResult]:
        if after:
            await runs.delete(run.record.tenant, run.id)
        return await results(run, after, limit)

    monkeypatch.setattr(runs, "results", deleted_after_the_first_page)
    monkeypatch.setattr(workflow_events, "DEFAULT_PAGE", 2)
    sent = [line.partition("data: ")[2] for line in client.get(f"/v1/runs/{run}/events").text.split("\n\n") if line]
    told = [json.loads(data) for data in sent]
    assert [each.get("type") for each in told] == ["run", "row", "row", "progress", None]
    assert told[-1]["error"]["code"] == "run_not_found"
    assert "behind number 2" in told[-1]["error"]["message"]


# ---- idempotency


def test_a_second_request_with_the_same_key_is_the_first(client: httpx.Client) -> None:
    key = {"idempotency-key": "k1"}
    first = start(client, ASK, headers=key)
    again = start(client, ASK, headers=key)
    assert again == first
    assert start(client, ASK, headers=key, background=True)["id"] == first["id"]
    assert start(client, ASK, headers=BOB | key)["id"] != first["id"]
    id = create(client, ASK)
    for other in ({"rows": ROWS[:1]}, {"rows": ROWS, "cache": False}):
        refused = client.post(f"/v1/workflows/{id}/runs", json=other, headers=key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "Idempotency-Key")
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
    long = client.post(f"/v1/workflows/{id}/runs", json={"rows": ROWS}, headers={"idempotency-key": "k" * 256})
    assert long.status_code == 400


def test_requests_with_one_key_at_once_are_one_run(stepped: RunningServer) -> None:
    with stepped.http() as client, ThreadPoolExecutor(8) as pool:
        id = create(client, ASK)
        ask = partial(
            client.post,
            f"/v1/workflows/{id}/runs",
            json={"rows": ROWS, "background": True},
            headers={"idempotency-key": "k"},
        )
        found = {future.result().json()["id"] for future in [pool.submit(ask) for _ in range(8)]}
        assert len(found) == 1
        assert len(client.get("/v1/runs").json()["data"]) == 1
        client.post(f"/v1/runs/{found.pop()}/cancel")
        assert_nothing_left(stepped)


# ---- ends


def test_cancelling_frees_everything(stepped: RunningServer) -> None:
    with stepped.http() as client:
        run = start(client, ASK, background=True)["id"]
        stepped.wait_until(lambda: len(stepped.engine.sequences) == 5)
        ended = client.post(f"/v1/runs/{run}/cancel").json()
        assert (ended["status"], ended["error"]["kind"]) == ("cancelled", "run_cancelled")
        assert_nothing_left(stepped)
        assert stepped.engine.steps == 0
        # It goes on when asked to.
        resumed = client.post(f"/v1/runs/{run}/resume").json()
        assert (resumed["status"], resumed["error"]) in (("queued", None), ("running", None))
        stepped.wait_until(lambda: len(stepped.engine.sequences) == 5)
        client.post(f"/v1/runs/{run}/cancel")
        assert_nothing_left(stepped)


def test_results_that_were_on_their_way_at_the_end_of_a_run_count(
    stepped: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirming: list[RunExecution] = []

    async def confirm(self: RunExecution, state: Any, result: Any) -> None:
        confirming.append(self)
        await asyncio.Event().wait()

    def are_stored() -> bool:
        results = confirming[0]._unconfirmed if confirming else ()
        return len(results) == 3 and all(result.written.done() for result in results)

    monkeypatch.setattr(RunExecution, "_confirm_one", confirm)
    with stepped.http() as client:
        run = start(client, PLAIN, ROWS[:3], background=True)["id"]
        stepped.wait_until(are_stored)
        assert client.get(f"/v1/runs/{run}").json()["workflow"]["done"] == 0
        client.post(f"/v1/runs/{run}/cancel")
        assert_nothing_left(stepped)
        ended = client.get(f"/v1/runs/{run}").json()
        assert (ended["status"], ended["workflow"]["done"]) == ("cancelled", 3)
        page = client.get(f"/v1/runs/{run}/results?limit=2").json()
        assert (len(page["data"]), page["has_more"]) == (2, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_run_with_it(stepped: RunningServer, stream: bool) -> None:
    with stepped.http() as client:
        id = create(client, ASK)
        connection = connect(stepped, f"/v1/workflows/{id}/runs", {"rows": ROWS, "stream": stream})
        stepped.wait_until(lambda: len(stepped.engine.sequences) == 5)
        connection.close()
        assert_nothing_left(stepped)
        (run,) = client.get("/v1/runs").json()["data"]
        assert run["status"] == "cancelled"


def test_a_client_with_a_key_may_come_back(stepped: RunningServer) -> None:
    with stepped.http() as client:
        data = json.dumps({"rows": ROWS}).encode()
        head = head_of(f"/v1/workflows/{create(client, ASK)}/runs", len(data))
        connection = socket.create_connection(("127.0.0.1", stepped.port), timeout=30)
        connection.sendall(head.removesuffix(b"\r\n") + b"Idempotency-Key: k\r\n\r\n" + data)
        stepped.wait_until(lambda: len(stepped.engine.sequences) == 5)
        connection.close()
        stepped.wait_until(lambda: stepped.service.num_active == 0)
        (run,) = client.get("/v1/runs").json()["data"]
        assert run["status"] == "running"
        client.post(f"/v1/runs/{run['id']}/cancel")
        assert_nothing_left(stepped)


def test_runs_wait_for_their_turn_by_tenant() -> None:
    config = WorkflowsConfig(max_runs=3, max_runs_per_tenant=2, max_waiting=1)
    make = partial(WorkflowService, config=config)
    with running(auto=False, workflows=make, api_keys=["alice=a", "bob=b"]) as server, server.http() as client:
        alice = [start(client, ASK, background=True, headers=ALICE)["id"] for _ in range(3)]
        # The run of Alice that waits takes no place from Bob.
        bob = [start(client, ASK, background=True, headers=BOB)["id"] for _ in range(2)]

        def statuses(runs: list[str], headers: dict[str, str]) -> list[str]:
            return [client.get(f"/v1/runs/{run}", headers=headers).json()["status"] for run in runs]

        server.wait_until(lambda: len(server.engine.sequences) == 15)
        assert statuses(alice, ALICE) == ["running", "running", "queued"]
        assert statuses(bob, BOB) == ["running", "queued"]
        refused = client.post(
            f"/v1/workflows/{client.get('/v1/workflows', headers=BOB).json()['data'][0]['id']}/runs",
            json={"rows": ROWS},
            headers=BOB,
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        client.post(f"/v1/runs/{alice[2]}/cancel", headers=ALICE)
        assert statuses(alice, ALICE) == ["running", "running", "cancelled"]
        client.post(f"/v1/runs/{alice[0]}/cancel", headers=ALICE)
        server.wait_until(lambda: len(server.engine.sequences) == 15)
        assert statuses(bob, BOB) == ["running", "running"]
        for run, headers in [(alice[1], ALICE), (bob[0], BOB), (bob[1], BOB)]:
            client.post(f"/v1/runs/{run}/cancel", headers=headers)
        assert_nothing_left(server)


def test_runs_that_are_started_at_once_share_the_places_of_those_that_wait() -> None:
    config = WorkflowsConfig(max_runs=1, max_runs_per_tenant=1, max_waiting=3)
    with running(workflows=partial(WorkflowService, config=config)) as server, server.http() as client:
        id = create(client, graph({"id": "person", "op": "external"}))
        asked = {"rows": [{"q": "x"}], "background": True}
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda _: client.post(f"/v1/workflows/{id}/runs", json=asked), range(32)))
        assert {answer.status_code for answer in answers} == {202, 429}
        assert server.service.workflows.runs.num_waiting <= 3
        for run in client.get("/v1/runs").json()["data"]:
            client.post(f"/v1/runs/{run['id']}/cancel")
        assert_nothing_left(server)


def test_a_graph_without_nodes_and_one_whose_node_nothing_needs(client: httpx.Client) -> None:
    for raw in (graph(outputs={"out": "q"}), graph(text("t"), outputs={"out": "q"})):
        run = start(client, raw)
        assert (run["status"], run["workflow"]["done"], run["error"]) == ("finished", 5, None)


def test_a_tenant_keeps_so_much_and_so_many() -> None:
    config = WorkflowsConfig(max_run_bytes=4000, max_kept_runs=3, max_rows=10)
    with running(workflows=partial(WorkflowService, config=config)) as server, server.http() as client:
        runs = [start(client, PLAIN)["id"] for _ in range(5)]
        assert [each["id"] for each in client.get("/v1/runs").json()["data"]] == runs[:1:-1]
        id = create(client, PLAIN)
        refused = client.post(f"/v1/workflows/{id}/runs", json={"rows": [{"q": "x" * 4000}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
        assert "workflows.max_run_bytes" in refused.json()["error"]["message"]
        refused = client.post(f"/v1/workflows/{id}/runs", json={"rows": [{"q": "x"}] * 11})
        assert (refused.status_code, "workflows.max_rows" in refused.text) == (400, True)


def test_a_workflow_of_a_run_in_progress_stays(stepped: RunningServer) -> None:
    with stepped.http() as client:
        run = start(client, ASK, background=True)["id"]
        id = client.get(f"/v1/runs/{run}").json()["workflow"]["id"]
        refused = client.delete(f"/v1/workflows/{id}")
        assert (refused.status_code, "cancel" in refused.json()["error"]["message"]) == (400, True)
        client.post(f"/v1/runs/{run}/cancel")
        assert client.delete(f"/v1/workflows/{id}").status_code == 200
        assert client.post(f"/v1/runs/{run}/resume").json()["error"]["code"] == "workflow_not_found"
        assert_nothing_left(stepped)


def test_a_workflow_of_a_run_that_is_being_started_stays(stepped: RunningServer) -> None:
    runs = stepped.service.workflows.runs
    with runs._room("t", "w"), pytest.raises(InvalidRequest, match="is being started"):
        runs.check_unused("t", "w")
    runs.check_unused("t", "w")


def test_answers_are_those_of_the_endpoint(stepped: RunningServer) -> None:
    stepped.on_loop(lambda: stepped.engine.script(ids("hello")))
    with stepped.http() as client, ThreadPoolExecutor() as pool:
        run = pool.submit(lambda: start(client, graph(llm("a", "{{q}}", max_tokens=20)), ROWS[:1]))
        stepped.wait_until(lambda: bool(stepped.engine.sequences))
        stepped.on_loop(lambda: stepped.engine.step(20))
        assert run.result(60)["results"]["data"][0]["outputs"] == {"out": "hello"}
        assert_nothing_left(stepped)


def test_an_answer_that_a_shorter_context_cut_is_not_that_of_a_longer_one(tmp_path: Path) -> None:
    ask = graph(llm("a", "Say {{q}}", temperature=0))  # as much as the context has room for
    lengths = []
    for context in (48, 400):
        engine = FakeEngine(msgspec.structs.replace(DEFAULT_INFO, max_context=context))
        made = lambda models: WorkflowService(models, database=Database(tmp_path))  # noqa: E731
        with running(engine=engine, workflows=made) as server, server.http() as client:
            run = start(client, ask, [{"q": "x"}])
            assert run["workflow"]["calls"]["cached_calls"] == 0
            lengths.append(len(run["results"]["data"][0]["outputs"]["out"]))
    assert lengths[0] < 48 < lengths[1]
