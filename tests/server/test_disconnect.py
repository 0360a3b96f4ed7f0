"""Clients that go away, read slowly, or come in crowds: nothing is left open, nothing grows without bound."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import pytest

from tests.server.conftest import RunningServer, running
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine

BODIES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}),
    "several choices": ("/v1/completions", {"prompt": "ab", "n": 4, "max_tokens": 100}),
    "several prompts": ("/v1/completions", {"prompt": ["ab", "cd", "ef"], "n": 2, "max_tokens": 100}),
    "embeddings": ("/v1/embeddings", {"input": ["ab"] * 10}),
}


def head_of(path: str, size: int) -> bytes:
    """Request line and headers of a JSON body of so many bytes."""
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
    return f"POST {path} HTTP/1.1\r\n{headers}\r\n".encode()


def connect(server: RunningServer, path: str, body: dict) -> socket.socket:
    """Send a request and leave the connection open."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    data = json.dumps(body).encode()
    connection.sendall(head_of(path, len(data)) + data)
    return connection


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    """What the server sends, up to the marker at least."""
    answer = b""
    while marker not in answer:
        part = connection.recv(65536)
        assert part, f"the connection ended after {answer!r}"
        answer += part
    return answer


def read_to_end(connection: socket.socket) -> bytes:
    """What the server sends until the response, chunked, is complete."""
    return read_until(connection, b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", list(BODIES))
def test_gone_before_the_first_token(stepped: RunningServer, what: str, stream: bool) -> None:
    path, body = BODIES[what]
    connection = connect(stepped, path, body | ({"stream": True} if stream and what != "embeddings" else {}))
    stepped.wait_until(lambda: bool(stepped.engine.sequences))
    connection.close()
    # The engine never moves: what is given back is given back without a step.
    stepped.assert_nothing_left()
    assert stepped.engine.steps == 0


def test_gone_while_the_prompt_waits_for_a_thread(stepped: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []

    async def never(*args: object, **options: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            ended.append(error)
            raise

    monkeypatch.setattr("weft.endpoints.chat.chats.encode", never)
    connection = connect(stepped, *BODIES["chat"])
    stepped.wait_until(lambda: stepped.service.num_active == 1)
    connection.close()
    stepped.assert_nothing_left()
    assert len(ended) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", ["chat", "several choices", "several prompts"])
def test_gone_in_the_middle(stepped: RunningServer, what: str, stream: bool) -> None:
    path, body = BODIES[what]
    connection = connect(stepped, path, body | {"stream": stream})
    stepped.wait_until(lambda: bool(stepped.engine.sequences))
    stepped.on_loop(lambda: stepped.engine.step(3))
    if stream:
        assert b"200 OK" in connection.recv(65536)
    connection.close()
    stepped.assert_nothing_left()
    assert stepped.engine.steps == 3
    metrics = stepped.service.metrics
    assert metrics.models["fake-model"].finished.get("abort") >= 1
    stepped.wait_until(lambda: metrics.http_in_flight == 0)
    assert metrics.http_requests.get("POST", path, "499") == 1


def test_gone_while_sending_the_body(stepped: RunningServer) -> None:
    connection = socket.create_connection(("127.0.0.1", stepped.port), timeout=30)
    connection.sendall(head_of("/v1/completions", 1000) + b"{")
    stepped.wait_until(lambda: stepped.service.num_active == 1)
    connection.close()
    stepped.assert_nothing_left()


def test_a_slow_reader_holds_the_program_back() -> None:
    info = DEFAULT_INFO
    with running(engine=FakeEngine(info, auto=False), max_response_logprobs=10**7) as server:
        body = {"prompt": "ab", "n": 64, "max_tokens": 4000, "stream": True, "logprobs": 20}
        connection = connect(server, "/v1/completions", body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.wait_until(lambda: bool(server.engine.sequences))
        writes = -1
        # Nobody reads. The engine goes on; once the buffers are full, the stream is not written any more.
        while writes != server.service.metrics.stream_writes:
            writes = server.service.metrics.stream_writes
            server.on_loop(lambda: server.engine.step(200))
            for _ in range(20):
                server.on_loop(lambda: None)
        assert server.engine.steps >= 400
        (protocol,) = server.server.server_state.connections
        # uvicorn's high-water mark is 64 KiB; one write may exceed it once.
        buffered = server.on_loop(protocol.transport.get_write_buffer_size)
        assert 0 < buffered < 2**21
        assert server.engine.sequences
        connection.close()
        server.assert_nothing_left()


async def ask_raw(server: RunningServer, body: dict, *, leaves: bool) -> bytes:
    """One request on a connection of its own; all of the answer, or the beginning of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**20)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read(100) if leaves else await reader.read()
    writer.close()
    return answer


def test_a_crowd_of_which_a_tenth_leaves(server: RunningServer) -> None:
    rng = random.Random(0)

    async def one(number: int) -> str:
        body = {"prompt": f"request {number}", "max_tokens": rng.randint(5, 60), "n": rng.choice([1, 1, 1, 2, 3])}
        leaves, streams = number % 10 == 0, number % 2 == 0
        answer = await ask_raw(server, body | {"stream": streams}, leaves=leaves)
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        if leaves:
            return "left"
        if streams:
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert answer.count(b'"finish_reason":"length"') == body["n"]
            return "streamed"
        choices = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]
        assert [len(choice["text"]) for choice in choices] == [body["max_tokens"]] * body["n"]
        return "whole"

    async def crowd() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(500)))

    ends = asyncio.run(crowd())
    assert {end: ends.count(end) for end in set(ends)} == {"whole": 250, "streamed": 200, "left": 50}
    server.assert_nothing_left()
    assert server.on_loop(lambda: len(server.service._interrupts)) == 0
