"""`WS /v1/runs/{id}`: messages of a run in both directions while it runs, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import RunningServer, running
from tests.server.test_programs import ECHO, FOREVER, assert_no_runs
from weft.server import run_socket

CHATTER = """
from weft.sdk import run
async def main(args):
    await run.receive()
    for number in range(args):
        run.send("x" * 1000)
        if number % 100 == 0:
            await run.sleep(0)
    return "done"
"""


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        assert_no_runs(server)


def launch(server: RunningServer, source: str, args: Any = None, **options: Any) -> str:
    body = {"source": source, "args": args, "background": True}
    run_id: str = server.post("/v1/runs", body, **options).json()["id"]
    return run_id


def attach(server: RunningServer, run_id: str, query: str = "", **options: Any) -> ClientConnection:
    return connect(f"{server.url.replace('http', 'ws')}/v1/runs/{run_id}{query}", **options)


def say(socket: ClientConnection, message: Any) -> None:
    socket.send(json.dumps({"type": "message", "message": message}))


def test_both_ways(server: RunningServer) -> None:
    with attach(server, launch(server, ECHO, 5)) as socket:
        first = json.loads(socket.recv())
        assert (first["type"], first["run"]["status"]) == ("run", "running")
        assert json.loads(socket.recv()) == {"type": "message", "message": {"got": 5}}
        say(socket, {"a": [1]})
        assert json.loads(socket.recv()) == {"type": "message", "message": {"heard": {"a": [1]}}}
        end = json.loads(socket.recv())
        assert (end["type"], end["run"]["result"]["message"]) == ("end", {"a": [1]})
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


def test_what_is_no_command_is_told(server: RunningServer) -> None:
    with attach(server, launch(server, FOREVER)) as socket:
        socket.recv()
        for text in ("nonsense", "{}", '{"type": "dance"}', '{"type": "message", "massage": 1}', "[" * 5000):
            socket.send(text)
            told = json.loads(socket.recv())
            assert (told["type"], told["error"]["kind"]) == ("error", "invalid_request")
        socket.send('{"type": "cancel"}')
        end = json.loads(socket.recv())
        assert end["run"]["status"] == "cancelled"


def test_a_frame_beyond_the_run_s_messages_is_not_read(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait while a large one is decoded."""
    read = run_socket._read
    sizes: list[int] = []

    def noted(message: Any) -> bytes | None:
        sizes.append(len(message["text"]))
        return read(message)

    monkeypatch.setattr(run_socket, "_read", noted)
    body = {"source": ECHO, "args": 5, "background": True, "limits": {"message_bytes": 100_000}}
    with attach(server, server.post("/v1/runs", body).json()["id"]) as socket:
        socket.recv()
        socket.recv()
        say(socket, "x" * 700_000)
        refused = json.loads(socket.recv())
        assert (refused["type"], refused["error"]["kind"]) == ("error", "limit_exceeded")
        assert not sizes
        say(socket, "x" * 90_000)
        assert json.loads(socket.recv())["message"] == {"heard": "x" * 90_000}
        assert len(sizes) == 1


def test_several_listen_and_leaving_ends_nothing(server: RunningServer) -> None:
    run_id = launch(server, ECHO, 1)
    with attach(server, run_id) as leaving:
        leaving.recv()
    with attach(server, run_id) as one, attach(server, run_id) as two:
        one.recv(), two.recv()
        say(one, "hi")
        for socket in (one, two):
            told = [json.loads(frame) for frame in socket]
            assert [event["type"] for event in told] == ["message", "message", "end"]
    with attach(server, run_id) as late:  # over: it hears what is kept
        assert [json.loads(frame)["type"] for frame in late] == ["run", "message", "message", "end"]


def test_a_client_that_does_not_read_stops_nobody(server: RunningServer) -> None:
    run_id = launch(server, CHATTER, 20_000)
    with attach(server, run_id, max_queue=1) as deaf:
        say(deaf, "go")
        history = server.service.programs.history
        run = history.find("", run_id)
        server.wait_until(lambda: run.ended)
        assert run.record().usage.messages_sent == 20_000
        assert run.kept_bytes < 2 << 20
        with pytest.raises(ConnectionClosed) as closed:
            list(iter(deaf.recv, None))
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


def test_strangers_are_refused() -> None:
    with running(api_keys=["alice=a-key", "bob=b-key"]) as server:
        run_id = launch(server, FOREVER, headers={"authorization": "Bearer a-key"})
        alice, bob = {"authorization": "Bearer a-key"}, {"authorization": "Bearer b-key"}
        for options, status in [
            ({}, 401),
            ({"query": "?api_key=wrong"}, 401),
            ({"query": "?api_key=a-key&api_key=a-key"}, 401),
            ({"additional_headers": bob}, 404),
            ({"query": "?api_key=b-key"}, 404),
        ]:
            with pytest.raises(InvalidStatus) as refused, attach(server, run_id, **options):
                pass
            response = refused.value.response
            assert response.status_code == status
            assert json.loads(response.body)["error"]["message"]
        with attach(server, run_id, "?api_key=a-key") as by_query, attach(server, run_id, additional_headers=alice):
            by_query.recv()
            by_query.send('{"type": "cancel"}')
            assert json.loads(by_query.recv())["type"] == "end"
        # Only a WebSocket, whose clients may not be able to send headers, has its key in the address.
        assert server.http().get("/v1/runs?api_key=a-key").status_code == 401
        assert_no_runs(server)


def test_pages_of_other_origins_are_refused() -> None:
    with running(cors_origins=["https://friend.example"]) as server:
        run_id = launch(server, FOREVER)
        with pytest.raises(InvalidStatus) as refused, attach(server, run_id, origin="https://evil.example"):
            pass
        assert refused.value.response.status_code == 403
        for origin in ("https://friend.example", server.url):
            with attach(server, run_id, origin=origin) as socket:
                assert json.loads(socket.recv())["type"] == "run"
        server.post(f"/v1/runs/{run_id}/cancel", {})
        assert_no_runs(server)


def test_there_is_nothing_there(server: RunningServer) -> None:
    for path in ("/v1/runs/run-0", "/v1/nothing", "/v1/chat/completions"):
        with pytest.raises(InvalidStatus) as refused, connect(server.url.replace("http", "ws") + path):
            pass
        assert refused.value.response.status_code in (403, 404, 405)


def test_a_drain_ends_sockets() -> None:
    with running(drain_s=0.0) as server, attach(server, launch(server, FOREVER)) as socket:
        socket.recv()
        server.stop()
        told = [json.loads(frame) for frame in socket]
        assert [event["run"]["status"] for event in told] in (["cancelled"], [])
