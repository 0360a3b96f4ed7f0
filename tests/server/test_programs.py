"""`/v1/programs` and `/v1/runs` over HTTP: uploads, runs, streams, tenants, clients that vanish."""

from __future__ import annotations

import ast
import asyncio
import builtins
import itertools
import json
import os
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Send

from tests.server.conftest import RunningServer, running
from tests.server.test_requests import error_of
from weft.abi.errors import ConfigError
from weft.config import ProgramsConfig
from weft.programs.run.runs import Run
from weft.programs.sandbox import checker
from weft.server import run_events
from weft.server.run_events import RunStream

ECHO = """
from weft.sdk import run

async def main(args):
    run.log("started")
    run.send({"got": args})
    message = await run.receive()
    run.send({"heard": message})
    return {"args": args, "message": message}
"""
ADD = "async def main(args):\n    return sum(args)\n"
SMALLEST_MODULE = bytes.fromhex(
    "0061736d0100000001040160000003020100050301000107100206" + b"memory".hex() + "020003" + b"run".hex() + "00000a0401"
    "02000b"
)
"""One that has a memory and does nothing."""
FOREVER = "from weft.sdk import run\nasync def main(args):\n    return await run.receive()\n"
SPIN = "def main(args):\n    while True: pass\n"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        assert_no_runs(server)


def assert_no_runs(server: RunningServer) -> None:
    server.wait_until(lambda: not list(server.service.programs.history.active()))
    server.assert_nothing_left()


def upload(client: httpx.Client, name: str, source: str) -> dict[str, Any]:
    response = client.post("/v1/programs", json={"name": name, "source": source})
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[Any]:
    lines = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_upload_list_run_delete(server: RunningServer) -> None:
    with server.http() as client:
        first = upload(client, "add", ADD)
        second = upload(client, "add", ADD + "# better\n")
        assert [version["hash"] for version in second["versions"]] == [first["hash"], second["hash"]]
        assert [program["name"] for program in client.get("/v1/programs").json()["data"]] == ["add"]
        assert client.get("/v1/programs/add").json() == second
        assert client.get(f"/v1/programs/{first['hash'][:12]}").json()["hash"] == first["hash"]

        run = client.post(f"/v1/programs/add@{first['hash']}/runs", json={"args": [1, 2, 3]}).json()
        assert (run["status"], run["result"], run["error"]) == ("finished", 6, None)
        assert (run["program"], run["hash"], run["trusted"]) == ("add", first["hash"], False)
        assert run["usage"]["cpu_s"] > 0
        assert client.get(f"/v1/runs/{run['id']}").json() == run
        listed = client.get("/v1/runs").json()["data"]
        assert [(one["id"], one["result"]) for one in listed] == [(run["id"], None)]

        assert client.delete(f"/v1/runs/{run['id']}").json() == {"object": "run.deleted", "id": run["id"]}
        assert client.get(f"/v1/runs/{run['id']}").status_code == 404
        gone = client.delete("/v1/programs/add").json()
        assert set(gone["deleted"]) == {first["hash"], second["hash"]}
        missing = client.post("/v1/programs/add/runs", json={})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "program_not_found")


def test_bodies_that_are_the_program(server: RunningServer) -> None:
    with server.http() as client:
        python = {"content-type": "text/x-python; charset=utf-8"}
        assert client.post("/v1/programs?name=add", content=ADD, headers=python).json()["kind"] == "python"
        wasm = {"content-type": "application/wasm"}
        module = client.post("/v1/programs?name=module", content=SMALLEST_MODULE, headers=wasm)
        assert module.json()["kind"] == "wasm"
        for answer in (
            client.post("/v1/programs", content=ADD, headers=python),
            client.post("/v1/programs?name=x", content=b"garbage", headers=wasm),
            client.post("/v1/programs?name=x", content=SMALLEST_MODULE.replace(b"run", b"ran"), headers=wasm),
            client.post("/v1/programs?name=x", content=b"\xff\x00garbage", headers=python),
            client.post("/v1/programs", json={"name": "x", "source": "def other(): pass"}),
            client.post("/v1/programs", json={"name": "../x", "source": ADD}),
            client.post("/v1/programs", json={"name": "x", "source": "\ud800".encode("utf-16", "surrogatepass").hex()}),
            client.post("/v1/programs", json={"name": "x", "sourc": ADD}),
        ):
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] in ("name", "source", "sourc")
        assert client.post("/v1/programs", content=b"x", headers={"content-type": "text/plain"}).status_code == 415
        assert len(client.get("/v1/programs").json()["data"]) == 2


def test_no_upload_is_parsed_by_the_server(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may take minutes to parse: another process parses it, with a time limit, and the server answers."""
    mark, parsed = "# parsed where it must not be", []

    def seen(function: Any) -> Any:
        def call(source: Any, *args: Any, **options: Any) -> Any:
            if mark in str(source):
                parsed.append(source)
            return function(source, *args, **options)

        return call

    monkeypatch.setattr(ast, "parse", seen(ast.parse))
    monkeypatch.setattr(builtins, "compile", seen(builtins.compile))
    monkeypatch.setattr(checker, "CHECK_CPU_S", 1)
    child = f"{mark}\n{ADD}"
    parent = f"""
        from weft.sdk import messaging
        async def main(args):
            return await messaging.launch(source={child!r}, args=[1]).join()
    """
    with server.http() as client:
        assert client.post("/v1/programs", json={"name": "add", "source": f"{mark}\n{ADD}"}).status_code == 200
        assert server.post("/v1/runs", {"source": f"{mark}\n{ADD}", "args": [1, 2]}).json()["result"] == 3
        assert server.post("/v1/runs", {"source": textwrap.dedent(parent)}).json()["result"] == 1
        fields = f"{mark}\nx = f'{'{a}' * 200_000}'\n{ADD}"
        for answer in (
            client.post("/v1/programs", json={"name": "x", "source": fields}),
            client.post("/v1/runs", json={"source": fields}),
        ):
            assert answer.status_code == 400
            assert "1 s of processor time" in answer.json()["error"]["message"]
    assert not parsed


def test_a_program_that_fails_is_told_so(server: RunningServer) -> None:
    source = "def helper():\n    raise KeyError('lost')\n\nasync def main(args):\n    helper()\n"
    run = server.post("/v1/runs", {"source": source}).json()
    assert run["status"] == "failed"
    assert run["error"]["kind"] == "program_failed"
    assert "lost" in run["error"]["message"]
    assert "line 2, in helper" in run["error"]["traceback"]


def test_limits_end_a_program_by_name(server: RunningServer) -> None:
    run = server.post("/v1/runs", {"source": SPIN, "limits": {"cpu_s": 0.2}}).json()
    assert (run["status"], run["error"]["kind"], run["error"]["param"]) == ("failed", "limit_exceeded", "cpu_s")
    run = server.post("/v1/runs", {"source": FOREVER, "limits": {"wall_s": 0.05}}).json()
    assert (run["error"]["kind"], run["error"]["param"]) == ("limit_exceeded", "wall_s")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"limits": {"cpu_s": 1e9}}, "limits.cpu_s"),
        ({"limits": {"cpu": 1}}, "limits.cpu"),
        ({"limits": {"cpu_s": -1}}, "limits.cpu_s"),
        ({"stream": True, "background": True}, "background"),
        ({"model": "nobody"}, "model"),
        ({"argz": 1}, "argz"),
        ({"program": "both"}, "source"),
        ({"messages": [1] * 101}, "messages"),
    ],
)
def test_requests_that_cannot_be(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/runs", {"source": ADD} | fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_the_operator_bounds_limits_that_a_run_does_not_ask_for() -> None:
    with running(programs=ProgramsConfig(max_cpu_s=10.0, max_wall_s=0.05)) as server:
        for limits in ({}, {"cpu_s": 5}):
            error = server.post("/v1/runs", {"source": FOREVER, "limits": limits}).json()["error"]
            assert (error["kind"], error["param"]) == ("limit_exceeded", "wall_s")
        for limits in ({"cpu_s": 20}, {"message_bytes": 17 << 20}, {"log_bytes": 65 << 20}):
            assert server.post("/v1/runs", {"source": ADD, "limits": limits}).status_code == 400


def test_null_is_a_message(server: RunningServer) -> None:
    run = server.post("/v1/runs", {"source": ECHO, "args": 7, "background": True}).json()
    assert server.post(f"/v1/runs/{run['id']}/messages", {"message": None}).status_code == 200
    server.wait_until(lambda: not list(server.service.programs.history.active()))
    told = server.http().get(f"/v1/runs/{run['id']}").json()
    assert told["result"] == {"args": 7, "message": None}


def test_messages_both_ways_in_a_stream(server: RunningServer) -> None:
    body = {"source": ECHO, "args": 7, "messages": ["hi"], "stream": True}
    told = events(server.post("/v1/runs", body).text)
    assert [event["type"] for event in told] == ["run", "message", "message", "end"]
    assert [event["message"] for event in told[1:3]] == [{"got": 7}, {"heard": "hi"}]
    assert told[-1]["run"]["result"] == {"args": 7, "message": "hi"}


def test_a_backlog_of_messages_is_sent_in_parts(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from weft.sdk import run


async def main(args):
    for at in range(100):
        run.send([at, "x" * 100])
"""
    done = server.post("/v1/runs", {"source": source}).json()
    monkeypatch.setattr(run_events, "MAX_SENT_BYTES", 1000)
    sizes: list[int] = []
    send = RunStream._send

    async def noted(self: RunStream, to: Send, data: bytes) -> None:
        sizes.append(len(data))
        await send(self, to, data)

    monkeypatch.setattr(RunStream, "_send", noted)
    with server.http() as client:
        told = events(client.get(f"/v1/runs/{done['id']}/messages").text)
    assert [event["message"][0] for event in told if event["type"] == "message"] == list(range(100))
    assert len(sizes) > 10
    assert max(sizes[1:-1]) < 1300


def test_in_the_background(server: RunningServer) -> None:
    with server.http() as client:
        started = client.post("/v1/runs", json={"source": ECHO, "args": 1, "background": True})
        assert started.status_code == 202
        path = f"/v1/runs/{started.json()['id']}"
        with client.stream("GET", path + "/messages") as stream:
            lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
            assert next(lines)["type"] == "run"
            assert next(lines)["message"] == {"got": 1}
            assert error_of(client.post(path + "/messages", json={}))["param"] == "message"
            told = client.post(path + "/messages", json={"message": [1, None]})
            assert told.status_code == 200
            assert next(lines)["message"] == {"heard": [1, None]}
            assert next(lines)["run"]["result"] == {"args": 1, "message": [1, None]}
        again = events(client.get(path + "/messages").text)  # over, and still told
        assert [event["type"] for event in again] == ["run", "message", "message", "end"]
        [line] = client.get(path + "/logs").json()["data"]
        assert (line["level"], line["text"]) == ("info", "started")
        late = client.post(path + "/messages", json={"message": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "run_ended")


def test_cancel(server: RunningServer) -> None:
    with server.http() as client:
        run = client.post("/v1/runs", json={"source": SPIN, "background": True}).json()
        early = client.delete(f"/v1/runs/{run['id']}")
        assert (early.status_code, early.json()["error"]["param"]) == (400, "run")
        ended = client.post(f"/v1/runs/{run['id']}/cancel").json()
        assert (ended["status"], ended["error"]["kind"]) == ("cancelled", "run_cancelled")
        assert client.post(f"/v1/runs/{run['id']}/cancel").json()["status"] == "cancelled"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_ends_its_run(server: RunningServer, stream: bool) -> None:
    history = server.service.programs.history
    with httpx.Client(base_url=server.url, timeout=60 if stream else 1) as client:
        request = client.build_request("POST", "/v1/runs", json={"source": ECHO, "args": 1, "stream": stream})
        if stream:
            response = client.send(request, stream=True)
            assert any("got" in line for line in itertools.islice(response.iter_lines(), 3))
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
    server.wait_until(lambda: bool(history.runs("")) and history.runs("")[0].ended)
    assert history.runs("")[0].record().error.message == "its client disconnected"


def test_who_follows_does_not_end_it(server: RunningServer) -> None:
    with server.http() as client:
        run = client.post("/v1/runs", json={"source": ECHO, "background": True}).json()
        with client.stream("GET", f"/v1/runs/{run['id']}/messages") as stream:
            next(stream.iter_lines())
        with client.stream("GET", f"/v1/runs/{run['id']}/messages") as stream:
            client.post(f"/v1/runs/{run['id']}/messages", json={"message": 1})
            assert "finished" in stream.read().decode()


def test_tenants_see_only_their_own() -> None:
    with running(api_keys=["alice=a-key", "bob=b-key"]) as server:
        alice = server.http(headers={"authorization": "Bearer a-key"})
        bob = server.http(headers={"authorization": "Bearer b-key"})
        assert server.http().get("/v1/programs").status_code == 401
        program = upload(alice, "add", ADD)
        run = alice.post("/v1/runs", json={"source": FOREVER, "background": True}).json()
        assert bob.get("/v1/programs").json()["data"] == []
        assert bob.get("/v1/runs").json()["data"] == []
        for method, path in [
            ("GET", "/v1/programs/add"),
            ("DELETE", "/v1/programs/add"),
            ("POST", "/v1/programs/add/runs"),
            ("GET", f"/v1/programs/{program['hash']}"),
            ("GET", f"/v1/runs/{run['id']}"),
            ("DELETE", f"/v1/runs/{run['id']}"),
            ("GET", f"/v1/runs/{run['id']}/logs"),
            ("GET", f"/v1/runs/{run['id']}/messages"),
            ("POST", f"/v1/runs/{run['id']}/messages"),
            ("POST", f"/v1/runs/{run['id']}/cancel"),
        ]:
            body = {"json": {"message": 1} if path.endswith("messages") else {}} if method == "POST" else {}
            assert bob.request(method, path, **body).status_code == 404, (method, path)
        assert alice.post(f"/v1/runs/{run['id']}/cancel").json()["status"] == "cancelled"
        assert_no_runs(server)


def test_the_operators_own_programs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\nasync def main(args):\n    return os.getpid()\n")
    (tmp_path / "_helper.py").write_text("nonsense(")
    with running(programs=ProgramsConfig(trusted_dir=str(tmp_path))) as server, server.http() as client:
        assert client.get("/v1/programs").json()["data"][0]["trusted"] is True
        run = client.post("/v1/programs/own/runs", json={}).json()
        assert run["trusted"] is True
        assert run["result"] == os.getpid()
        taken = client.post("/v1/programs", json={"name": "own", "source": ADD})
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")
        assert client.delete("/v1/programs/own").status_code == 400


def test_programs_may_start_with_the_server() -> None:
    with running(programs=ProgramsConfig(start="eager")) as server:
        assert server.post("/v1/runs", {"source": ADD, "args": [1, 2]}).json()["result"] == 3


def test_programs_may_be_off() -> None:
    with running(programs=ProgramsConfig(start="off")) as server:
        answer = server.post("/v1/runs", {"source": ADD})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("entry", ["http://localhost:9000", "alice=api.localhost", "no host"])
def test_hosts_that_no_program_could_reach_are_refused_at_the_start(entry: str) -> None:
    says = "names no host" if entry == "no host" else "localhost is at .* lists the address itself, with its port"
    network = ["example.com", "127.0.0.1:9000", entry]
    with (
        pytest.raises(ConfigError, match=f"programs.network: .*{says}"),
        running(programs=ProgramsConfig(network=network)),
    ):
        raise AssertionError("it started")


def test_quota_and_too_many() -> None:
    config = ProgramsConfig(max_uploads=1, max_runs=1, max_waiting=1)
    with running(programs=config) as server, server.http() as client:
        upload(client, "add", ADD)
        full = client.post("/v1/programs", json={"name": "b", "source": ADD + "#"})
        assert (full.status_code, full.json()["error"]["code"]) == (403, "quota_exceeded")
        runs = [client.post("/v1/runs", json={"source": FOREVER, "background": True}) for _ in range(3)]
        assert [run.status_code for run in runs] == [202, 202, 429]
        assert [run.json()["status"] for run in runs[:2]] == ["running", "queued"]
        assert runs[2].headers["retry-after"] == "1"
        for run in reversed(runs[:2]):
            assert client.post(f"/v1/runs/{run.json()['id']}/cancel").json()["status"] == "cancelled"
        assert_no_runs(server)


def test_a_hundred_at_once(server: RunningServer) -> None:
    with server.http() as client:
        upload(client, "add", ADD)

        def one(number: int) -> int:
            answer: int = client.post("/v1/programs/add/runs", json={"args": [number, 1]}).json()["result"]
            return answer

        with ThreadPoolExecutor(50) as pool:
            assert list(pool.map(one, range(100))) == [number + 1 for number in range(100)]


def test_metrics_count_runs(server: RunningServer) -> None:
    with server.http() as client:
        client.post("/v1/runs", json={"source": ADD, "args": [1]})
        client.post("/v1/runs", json={"source": ADD, "args": "no numbers"})
        run = client.post("/v1/runs", json={"source": FOREVER, "background": True}).json()
        lines = client.get("/metrics").text.splitlines()
        assert {
            "weft:program_runs_running 1.0",
            "weft:program_runs_waiting 0.0",
            'weft:program_runs_total{status="finished"} 1.0',
            'weft:program_runs_total{status="failed"} 1.0',
            "weft:program_host_restarts_total 0.0",
        } <= set(lines)
        client.post(f"/v1/runs/{run['id']}/cancel")


def test_a_drain_gives_runs_their_time() -> None:
    with running(drain_s=60.0) as server, server.http() as client:
        run = client.post("/v1/runs", json={"source": FOREVER, "background": True}).json()
        server.server.loop.call_soon_threadsafe(server.server.begin_drain)
        server.wait_until(lambda: server.service.draining)
        assert client.post("/v1/runs", json={"source": ADD}).status_code == 503
        assert client.post(f"/v1/runs/{run['id']}/messages", json={"message": "go"}).status_code == 200
        history = server.service.programs.history
        server.join()
        assert history.runs("")[0].result == b'"go"'


def test_a_run_that_is_being_launched_as_a_drain_begins_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(drain_s=60.0) as server, server.http() as client:
        programs, began, go = server.service.programs, threading.Event(), asyncio.Event()
        launch = programs.launch

        async def late(*args: Any) -> Run:
            began.set()
            await go.wait()
            return await launch(*args)

        monkeypatch.setattr(programs, "launch", late)
        with ThreadPoolExecutor(1) as pool:
            posted = pool.submit(server.post, "/v1/runs", {"source": FOREVER, "background": True})
            assert began.wait(60)
            server.server.loop.call_soon_threadsafe(server.server.begin_drain)
            server.wait_until(lambda: server.service.draining)
            server.on_loop(go.set)
            run = posted.result().json()["id"]
        assert client.post(f"/v1/runs/{run}/messages", json={"message": "go"}).status_code == 200
        server.join()
        assert programs.history.runs("")[0].result == b'"go"'


def test_a_drain_ends_runs_that_outlast_it() -> None:
    with running(drain_s=0.0) as server, server.http() as client:
        client.post("/v1/runs", json={"source": FOREVER, "background": True})
        history = server.service.programs.history
        server.stop()
        assert history.runs("")[0].status == "cancelled"
