"""How many Python calls the front makes for a streamed token and for a request.

The bounds are what the front needs now and a little more: a change that exceeds one makes every token, or every
request, slower. Calls outside Weft (event loop, uvicorn, starlette) are not counted.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.python_calls import CallCounter
from tests.server.conftest import MODEL, RunningServer, running

STREAMS = 8
STEPS = 10


@contextmanager
def streams(server: RunningServer, path: str, **fields: object) -> Iterator[None]:
    """Streams that have begun: each engine step from now on is one token of each."""
    body = json.dumps({"model": MODEL, "max_tokens": 100, "stream": True, "ignore_eos": True, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(STREAMS)]
    try:
        for connection in sockets:
            connection.sendall(head.encode() + body)
        server.wait_until(lambda: len(server.engine.sequences) == STREAMS)
        yield
    finally:
        for connection in sockets:
            connection.close()
        server.assert_nothing_left()


def step(server: RunningServer) -> None:
    """One token of each stream, until all are written."""
    metrics = server.service.metrics
    written = metrics.stream_writes + STREAMS
    server.on_loop(server.engine.step)
    server.wait_until(lambda: metrics.stream_writes >= written)


def calls_per_token(path: str, **fields: object) -> float:
    counter = CallCounter()
    with running(auto=False) as server, streams(server, path, **fields):
        for _ in range(3):
            step(server)
        server.on_loop(counter.start)
        for _ in range(STEPS):
            step(server)
        server.on_loop(counter.stop)
    return counter.count / (STREAMS * STEPS)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        ("/v1/chat/completions", CHAT, 43),
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}, 43),
        ("/v1/completions", {"prompt": "hi"}, 42),
    ],
    ids=["chat", "chat with usage", "completion"],
)
def test_a_streamed_token_makes_a_bounded_number_of_calls(path: str, fields: dict[str, object], most: int) -> None:
    # Of a whole number, up to what the turns of the server's loop add.
    assert calls_per_token(path, **fields) <= most + 0.5


def test_a_token_of_an_answer_that_is_sent_whole_makes_few_calls() -> None:
    counter = CallCounter()
    with running(auto=False) as server, streams(server, "/v1/chat/completions", **CHAT, stream=False):
        for _ in range(3):
            server.on_loop(server.engine.step)
        server.on_loop(counter.start)
        for _ in range(STEPS):
            server.on_loop(server.engine.step)
            server.on_loop(lambda: None)
        server.on_loop(counter.stop)
    assert counter.count / (STREAMS * STEPS) <= 4


def test_a_streamed_request_makes_a_bounded_number_of_calls() -> None:
    counter = CallCounter()
    with running(auto=False) as server:
        with streams(server, "/v1/chat/completions", **CHAT):
            step(server)
        server.on_loop(counter.start)
        with streams(server, "/v1/chat/completions", **CHAT):
            step(server)
        server.on_loop(counter.stop)
    # Of 421.6, up to what the turns of the server's loop add.
    assert counter.count / STREAMS <= 425
