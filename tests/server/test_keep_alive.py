"""A stream that has nothing to say is not silent, however long its request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.requests import Request
from starlette.types import Message

from tests.programs.help import settle
from tests.server.conftest import MODEL, ManualTimer, RunningServer, ids, running
from tests.server.test_disconnect import connect, read_to_end, read_until
from weft.abi.errors import ConfigError
from weft.config import ServerConfig
from weft.endpoints.models import ServedModel
from weft.server.sse import COMMENT, EventStream
from weft.server.state import Service
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

BODY = {"prompt": "ab", "max_tokens": 3, "stream": True}


@pytest.fixture
def timer() -> ManualTimer:
    return ManualTimer()


@pytest.fixture
def waiting(timer: ManualTimer) -> Iterator[RunningServer]:
    """A server whose engine and time move only when told to."""
    with running(auto=False, timer=timer, engine_wait_s=0.0) as server:
        yield server


def pass_time(server: RunningServer, timer: ManualTimer, seconds: float) -> None:
    """Once the one stream has nothing to do but to wait; and until it waits again."""
    server.wait_until(lambda: len(timer.sleepers) == 1)
    server.on_loop(lambda: timer.advance(seconds))
    server.wait_until(lambda: len(timer.sleepers) == 1)


def test_a_comment_whenever_nothing_was_said_for_so_long(waiting: RunningServer, timer: ManualTimer) -> None:
    connection = connect(waiting, "/v1/completions", BODY)
    pass_time(waiting, timer, 14.0)
    assert list(timer.sleepers.values()) == [15.0]
    pass_time(waiting, timer, 1.0)
    text = read_until(connection, COMMENT)
    assert text.startswith(b"HTTP/1.1 200 OK")
    pass_time(waiting, timer, 15.0)
    text += read_until(connection, COMMENT)
    pass_time(waiting, timer, 10.0)
    waiting.on_loop(lambda: waiting.engine.step(1))
    text += read_until(connection, b"data: ")
    pass_time(waiting, timer, 5.0)  # since the last comment; since the token, none
    assert list(timer.sleepers.values()) == [55.0]
    waiting.on_loop(lambda: waiting.engine.step(2))
    text += read_to_end(connection)
    assert text.count(COMMENT) == 2
    assert b"data: [DONE]" in text
    connection.close()
    waiting.assert_nothing_left()
    waiting.wait_until(lambda: not timer.sleepers)


def test_the_openai_client_reads_through_comments(waiting: RunningServer, timer: ManualTimer) -> None:
    def ask() -> str:
        stream = waiting.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=9, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    waiting.on_loop(lambda: waiting.engine.script(ids("hello")))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        pass_time(waiting, timer, 15.0)
        pass_time(waiting, timer, 15.0)
        waiting.on_loop(lambda: waiting.engine.step(2))
        pass_time(waiting, timer, 30.0)
        waiting.on_loop(lambda: waiting.engine.step(4))
        assert answer.result(60) == "hello"


def test_after_a_comment_an_error_is_an_event(waiting: RunningServer, timer: ManualTimer) -> None:
    connection = connect(waiting, "/v1/completions", BODY)
    pass_time(waiting, timer, 15.0)
    text = read_until(connection, COMMENT)
    waiting.on_loop(waiting.engine.die)
    text += read_to_end(connection)
    assert text.startswith(b"HTTP/1.1 200 OK")
    assert b"engine_unavailable" in text.rpartition(b"data: ")[2]
    assert b"[DONE]" not in text
    connection.close()
    waiting.assert_nothing_left()


def test_no_comments_behind_an_event_that_the_client_does_not_read(timer: ManualTimer) -> None:
    sent: list[bytes] = []
    slow = asyncio.Event()
    slow.set()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            await slow.wait()

    async def main() -> None:
        service = Service(ServerConfig(), [ServedModel([MODEL], FakeEngine(), byte_tokenizer())], timer)
        stream = EventStream(Request({"type": "http"}), service)
        with stream._kept_alive(send):
            await stream._send(send, b"one")
            slow.clear()
            event = asyncio.create_task(stream._send(send, b"two"))
            for _ in range(5):
                await settle()
                assert len(timer.sleepers) == 1
                timer.advance(15.0)
            await settle()
            assert sent == [b"one", b"two"]
            slow.set()
            await event
            timer.advance(15.0)
            await settle()
            assert sent == [b"one", b"two", COMMENT]

    asyncio.run(main())


def test_it_can_be_switched_off(timer: ManualTimer) -> None:
    with running(auto=False, timer=timer, stream_keep_alive_s=0.0) as server:
        connection = connect(server, "/v1/completions", BODY)
        server.wait_until(lambda: bool(server.engine.sequences))
        assert not timer.sleepers
        server.on_loop(lambda: server.engine.step(3))
        text = read_to_end(connection)
        assert b"data: [DONE]" in text
        assert b"\n:" not in text
        connection.close()
    with pytest.raises(ConfigError, match="stream_keep_alive_s must not be negative"):
        ServerConfig(stream_keep_alive_s=-1)
