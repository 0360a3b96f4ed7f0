"""Programs, and functions with source, in workflows of a server and in its sessions."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_programs import assert_no_runs, upload
from tests.server.test_workflow_restart import on, settled
from tests.server.test_workflow_runs import ALICE, BOB, create, start
from tests.workflow.shapes import Json, body, graph, llm, mapped
from weft.abi.errors import Overloaded, ProgramFailed
from weft.config import ProgramsConfig
from weft.programs.quota.limits import Limits
from weft.programs.registry import Code, Registry
from weft.programs.run.runs import Run, RunSpec
from weft.programs.types import Caller
from weft.server.programs import ServedPrograms
from weft.server.workflow_programs import ServedProgramRunner
from weft.store.database import FILE
from weft.workflow.service.programs import ProgramCall

ADD = "async def main(args):\n    return sum(args['numbers'])\n"
SHOUT = "async def main(args):\n    return args['text'].upper() + '!'\n"
WAITS = "from weft.sdk import run\nasync def main(args):\n    return await run.receive()\n"
BREAKS = "async def main(args):\n    raise ValueError('no ' + args['text'])\n"
SPINS = "def main(args):\n    while True: pass\n"
MODEL = """
from weft.sdk import Context

async def main(args):
    async with Context() as context:
        context.user("hi")
        return (await context.generate(max_tokens=4)).text
"""


def program(node_id: str, name: str, args: Any) -> Json:
    return {"id": node_id, "op": "program", "program": name, "args": args}


def source(node_id: str, code: str, **args: Any) -> Json:
    return {"id": node_id, "op": "function", "source": code, "args": args}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(api_keys=["alice=a", "bob=b"]) as server:
        yield server


@pytest.fixture
def client(shared: RunningServer) -> Iterator[httpx.Client]:
    with shared.http(headers=ALICE) as client:
        yield client
    assert_no_runs(shared)


def outputs(run: Json) -> dict[int, Any]:
    return {row["row"]: row.get("error", row["outputs"].get("out")) for row in run["results"]["data"]}


def test_programs_and_sources_of_nodes(shared: RunningServer, client: httpx.Client) -> None:
    upload(client, "add", ADD)
    raw = graph(program("sum", "add", {"numbers": "{{q}}"}), source("loud", SHOUT, text="{{sum}} of it"))
    run = start(client, raw, [{"q": [1, 2]}, {"q": [3, 4, 5]}])
    assert outputs(run) == {0: "3 OF IT!", 1: "12 OF IT!"}
    made = [each for each in client.get("/v1/runs").json()["data"] if each["kind"] == "python"]
    assert {each["program"] for each in made} == {"add", ""}
    assert len(made) == 4
    assert all(each["usage"]["cpu_s"] > 0 for each in made), "it is charged as any run of the tenant"
    assert client.get("/v1/runs", headers=BOB).json()["data"] == []


def test_in_bodies(client: httpx.Client) -> None:
    inside = body(source("loud", SHOUT, text="{{i}}"), value="loud")
    run = start(client, graph(mapped("each", "q", inside), outputs={"out": "each.value"}), [{"q": ["a", "b"]}])
    assert outputs(run) == {0: ["A!", "B!"]}


def test_what_cannot_run_is_refused_with_every_node(client: httpx.Client) -> None:
    raw = graph(
        program("one", "nobody", None),
        program("two", "nobody", None),
        source("three", "def other(): pass"),
        {"id": "four", "op": "function", "name": "mine", "args": {}},
        outputs={"out": "one", "b": "two", "c": "three", "d": "four"},
    )
    refused = client.post(f"/v1/workflows/{create(client, raw)}/runs", json={"rows": [{"q": 1}]})
    assert refused.status_code == 400
    mistakes = {each["place"]: each["message"] for each in refused.json()["error"]["mistakes"]}
    assert set(mistakes) == {"one", "two", "three", "four"}
    assert "no program 'nobody'" in mistakes["one"]
    assert "main" in mistakes["three"]


def test_a_program_of_another_tenant_is_none(client: httpx.Client) -> None:
    upload(client, "mine", ADD)
    raw = graph(program("sum", "mine", None))
    id = create(client, raw, BOB)
    refused = client.post(f"/v1/workflows/{id}/runs", json={"rows": [{"q": 1}]}, headers=BOB)
    assert "no program 'mine'" in refused.json()["error"]["mistakes"][0]["message"]


def test_what_fails_fails_its_row(client: httpx.Client) -> None:
    upload(client, "breaks", BREAKS)
    run = start(client, graph(program("p", "breaks", {"text": "{{q}}"})), [{"q": "a"}])
    error = outputs(run)[0]
    assert (error["node"], error["kind"]) == ("p", "program_failed")
    assert "no a" in error["message"]
    run = start(client, graph(source("f", BREAKS, text="{{q}}")), [{"q": "b"}])
    assert outputs(run)[0]["kind"] == "program_failed"


def test_a_source_computes_and_calls_no_model(client: httpx.Client) -> None:
    run = start(client, graph(source("f", MODEL)), [{"q": "a"}])
    error = outputs(run)[0]
    assert (error["node"], error["kind"]) == ("f", "limit_exceeded")
    assert "tokens" in error["message"]


def test_a_source_that_spins_is_ended() -> None:
    with running(programs=ProgramsConfig(max_cpu_s=0.2)) as server, server.http() as client:
        error = outputs(start(client, graph(source("f", SPINS)), [{"q": 1}]))[0]
        assert (error["node"], error["kind"]) == ("f", "limit_exceeded")
        assert_no_runs(server)


def test_the_operator_bounds_limits_that_nodes_do_not_ask_for() -> None:
    with running(programs=ProgramsConfig(max_cpu_s=10.0)) as server, server.http() as client:
        upload(client, "add", ADD)
        assert outputs(start(client, graph(program("sum", "add", {"numbers": "{{q}}"})), [{"q": [1, 2]}])) == {0: 3}


def test_programs_end_with_the_run_that_waits_for_them(shared: RunningServer, client: httpx.Client) -> None:
    upload(client, "waits", WAITS)
    run = start(client, graph(program("p", "waits", None)), [{"q": 1}, {"q": 2}], background=True)["id"]
    history = shared.service.programs.history
    shared.wait_until(lambda: [one.status for one in history.active()] == ["running"] * 2)
    client.post(f"/v1/runs/{run}/cancel")
    shared.wait_until(lambda: not list(history.active()))
    ended = [each for each in client.get("/v1/runs").json()["data"] if each["program"] == "waits"]
    assert {each["status"] for each in ended} == {"cancelled"}


def test_a_server_without_programs_says_so() -> None:
    with running(programs=ProgramsConfig(start="off")) as server, server.http() as client:
        raw = graph(source("f", SHOUT, text="{{q}}"))
        refused = client.post(f"/v1/workflows/{create(client, raw)}/runs", json={"rows": [{"q": 1}]})
        assert 'programs.start = "off"' in refused.json()["error"]["mistakes"][0]["message"]


def test_what_a_program_gave_is_not_computed_again_after_a_crash(tmp_path: Path) -> None:
    """A row whose program has ended goes on with its result; the call that was in flight is made again."""
    raw = graph(source("loud", SHOUT, text="{{q}}"), llm("a", "{{loud}}", max_tokens=4))
    with running(auto=False, workflows=on(tmp_path / "data")) as server, server.http() as client:
        run = start(client, raw, [{"q": "x"}], background=True)["id"]
        server.wait_until(lambda: bool(server.engine.sequences))
        server.service.workflows._database.write(lambda connection: None).result()
        (tmp_path / "killed").mkdir()
        with sqlite3.connect(tmp_path / "data" / FILE) as data:
            (tmp_path / "killed" / FILE).write_bytes(data.serialize())
        client.post(f"/v1/runs/{run}/cancel")
    with running(workflows=on(tmp_path / "killed")) as server, server.http() as client:
        settled(server, run)
        assert client.get(f"/v1/runs/{run}").json()["status"] == "finished"
        assert [each["kind"] for each in client.get("/v1/runs").json()["data"]] == ["workflow"]


@pytest.mark.parametrize("by_signal", [False, True])
def test_rows_whose_programs_a_shutdown_ends_go_on_with_the_next_server(tmp_path: Path, by_signal: bool) -> None:
    raw = graph(source("f", WAITS))
    with running(workflows=on(tmp_path), drain_s=60.0 if by_signal else 0.0) as server, server.http() as client:
        run = start(client, raw, [{"q": 1}, {"q": 2}], background=True)["id"]
        history = server.service.programs.history
        server.wait_until(lambda: [one.status for one in history.active()] == ["running"] * 2)
        if by_signal:
            server.on_loop(server.server.begin_drain)
        server.stop()
    with running(workflows=on(tmp_path)) as server, server.http() as client:
        history = server.service.programs.history
        server.wait_until(lambda: [one.status for one in history.active()] == ["running"] * 2)
        for one in list(history.active()):
            client.post(f"/v1/runs/{one.id}/messages", json={"message": "done"})
        settled(server, run)
        ended = client.get(f"/v1/runs/{run}").json()
        assert (ended["status"], ended["workflow"]["done"], ended["workflow"]["failed"]) == ("finished", 2, 0)


def test_in_sessions(shared: RunningServer, client: httpx.Client) -> None:
    upload(client, "add", ADD)
    nodes = [
        program("sum", "add", {"numbers": [1, 2]}),
        source("loud", SHOUT, text="{{sum}} of"),
        {"id": "list", "op": "data", "value": ["a", "b"]},
        mapped("each", "list", body(source("inner", SHOUT, text="{{i}}"), value="inner")),
        program("gone", "nobody", None),
        program("waits", "waits", None),
    ]
    upload(client, "waits", WAITS)
    made = client.post("/v1/calls", json={"session_id": "s", "nodes": nodes}).json()
    ids = {each["name"]: each["id"] for each in made["variables"]}
    assert client.get(f"/v1/variables/{ids['loud']}").json()["value"] == "3 OF!"
    assert client.get(f"/v1/variables/{ids['each']}").json()["value"] == {"value": ["A!", "B!"]}
    failed = client.get(f"/v1/variables/{ids['gone']}").json()
    assert (failed["status"], "no program 'nobody'" in failed["error"]["message"]) == ("failed", True)
    history = shared.service.programs.history
    shared.wait_until(lambda: [one.status for one in history.active()] == ["running"])
    client.delete("/v1/sessions/s")
    shared.wait_until(lambda: not list(history.active()))


def test_sources_that_were_checked_are_not_kept() -> None:
    class Host:
        def charge(self, tenant: str, cpu_s: float) -> None:
            pass

        async def close(self) -> None:
            pass

    async def test() -> None:
        programs = ServedPrograms(ProgramsConfig(), Registry(), lambda programs: Host())
        runner = ServedProgramRunner(programs, SimpleNamespace(find=lambda name: None))
        text = SHOUT + "# a text of its own"
        before = sys.getrefcount(text)
        await runner.check("t", None, text, None)
        assert sys.getrefcount(text) == before
        await programs.close()

    asyncio.run(test())


@pytest.mark.parametrize("has_run", [True, False])
def test_only_a_program_of_which_nothing_has_run_counts_as_refused(has_run: bool) -> None:
    """A workflow tries a refused program again."""

    class Programs:
        def limits(self, given: Json) -> Limits:
            return Limits()

        async def inline_code(self, tenant: str, source: str) -> Code:
            return Code(kind="python", content=source.encode(), hash="")

        async def launch(self, spec: RunSpec, caller: Caller) -> Run:
            run = Run(spec, caller.tenant)
            if has_run:
                run.start()
            run.fail(Overloaded("the program says too much"))
            return run

    async def test() -> None:
        model = SimpleNamespace(names=["m"])
        runner = ServedProgramRunner(Programs(), SimpleNamespace(usable=lambda name: model))
        with pytest.raises(ProgramFailed if has_run else Overloaded, match="the program says too much"):
            await runner.run(ProgramCall("t", None, ADD, {}, "r"))

    asyncio.run(test())


def test_metrics_of_runs(shared: RunningServer, client: httpx.Client) -> None:
    def counts() -> dict[str, float]:
        lines = client.get("/metrics").text.splitlines()
        found = (line.rsplit(" ", 1) for line in lines if line.startswith("weft:workflow_"))
        return {name: float(value) for name, value in found}

    before = counts()
    ask = graph(llm("a", "{{q}}", max_tokens=3, temperature=0))
    for rows in ([{"q": "x"}, {"q": "y"}], [{"q": "x"}]):
        start(client, ask, rows)
    start(client, graph(source("f", BREAKS, text="{{q}}")), [{"q": "b"}])
    after = counts()

    def grown(name: str) -> float:
        return after[f"weft:workflow_{name}"] - before.get(f"weft:workflow_{name}", 0.0)

    assert grown('runs_total{status="finished"}') == 3
    assert grown('rows_total{status="finished"}') == 3
    assert grown('rows_total{status="failed"}') == 1
    assert grown('calls_total{answer="model"}') == 2
    assert grown('calls_total{answer="cache"}') == 1
    assert grown('tokens_total{kind="output"}') == 6
    assert grown('tokens_total{kind="prefill"}') == grown('tokens_total{kind="prompt"}') > 0
    assert grown("call_run_seconds_count") == 2
    assert (after["weft:workflow_runs_running"], after["weft:workflow_runs_waiting"]) == (0, 0)
