"""Clients of runs that vanish without a word, or never read: their own runs end, others go on, nothing is left."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_disconnect import connect, read_until
from tests.server.test_programs import assert_no_runs
from weft.programs.run.runs import Run

BUSY = """
from weft.sdk import Context, Stop, run

async def main(args):
    ctx = Context()
    ctx.fill("Once upon a time")
    async for piece in ctx.generate(stop=Stop(max_tokens=3, ignore_eos=True)):
        run.send("begun")
    return [await run.receive(), len(ctx.tokens)]
"""
CHATTER = """
from weft.sdk import run

async def main(args):
    await run.receive()
    for number in range(args):
        run.send("x" * 1000)
        if number % 100 == 0:
            await run.sleep(0)
    run.log("said it all")
    return await run.receive()
"""
Vanish = Callable[[socket.socket], None]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        assert_no_runs(server)


def end(connection: socket.socket) -> None:
    """As the system closes what a process that was killed leaves behind."""
    connection.close()


def reset(connection: socket.socket) -> None:
    """As a machine answers that was restarted, or a middlebox that has forgotten the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


vanishing = pytest.mark.parametrize("vanish", [end, reset])


def launch(server: RunningServer, source: str, args: Any = None) -> Run:
    body = {"source": source, "args": args, "background": True}
    run_id = server.post("/v1/runs", body).json()["id"]
    return server.service.programs.history.find("", run_id)


def follow(server: RunningServer, run: Run) -> socket.socket:
    """Its messages as a stream."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(f"GET /v1/runs/{run.id}/messages HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


def attach(server: RunningServer, run: Run) -> socket.socket:
    """A WebSocket, by hand: no library that says goodbye."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"GET /v1/runs/{run.id} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    connection.sendall(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode())
    return connection


@vanishing
def test_a_stream_that_launched_its_run_takes_it_along(server: RunningServer, vanish: Vanish) -> None:
    connection = connect(server, "/v1/runs", {"source": BUSY, "stream": True})
    read_until(connection, b'"begun"')
    assert server.runtime.num_sequences == 1
    vanish(connection)
    [run] = server.service.programs.history.runs("")
    server.wait_until(lambda: run.ended)
    error = run.record().error
    assert error is not None
    assert (run.status, error.kind, error.message) == ("cancelled", "run_cancelled", "its client disconnected")


@vanishing
@pytest.mark.parametrize("listen", [follow, attach])
def test_who_only_listens_leaves_without_a_trace(
    server: RunningServer, listen: Callable[[RunningServer, Run], socket.socket], vanish: Vanish
) -> None:
    run = launch(server, BUSY)
    connections = [listen(server, run) for _ in range(3)]
    for connection in connections:
        read_until(connection, b'"begun"')
    assert len(run._listeners) == 3
    for connection in connections:
        vanish(connection)
    server.wait_until(lambda: len(run._listeners) == 0)
    assert run.status == "running"
    server.on_loop(lambda: run.send(b'"go on"'))
    server.wait_until(lambda: run.ended)
    assert json.loads(run.result or b"null")[0] == "go on"


@pytest.mark.parametrize("owned", [True, False])
def test_a_stream_that_nobody_reads_stops_nobody(server: RunningServer, owned: bool) -> None:
    if owned:
        connection = connect(server, "/v1/runs", {"source": CHATTER, "args": 20_000, "stream": True})
        server.wait_until(lambda: bool(server.service.programs.history.runs("")))
        [run] = server.service.programs.history.runs("")
    else:
        run = launch(server, CHATTER, 20_000)
        connection = follow(server, run)
        server.wait_until(lambda: len(run._listeners) == 1)
    server.on_loop(lambda: run.send(b"null"))
    server.wait_until(lambda: bool(run.logs()))
    assert not run._listeners, "it is given up, and nothing is kept for it"
    assert run.kept_bytes < 2 << 20
    server.on_loop(lambda: run.send(b'"bye"'))
    server.wait_until(lambda: run.ended)
    assert (run.status, run.result, run.record().usage.messages_sent) == ("finished", b'"bye"', 20_000)
    assert server.chat().status_code == 200
    reset(connection)
