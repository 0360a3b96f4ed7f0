"""The measuring client against servers that behave, by the fake engine, and against bytes that do not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.conftest import MODEL, RunningServer, running
from weft.abi.errors import WeftError
from weft.cli.bench.client import StreamedAnswer, Target, open_client
from weft.cli.bench.measure import Failure, Outcome, Timing
from weft.cli.bench.workload import BenchRequest

PROMPT = list(b"once upon a time")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        server.assert_nothing_left()


def send(target: Target, *requests: BenchRequest, answers: list[StreamedAnswer] | None = None) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with open_client(target) as client:
            into = answers or [StreamedAnswer() for _ in requests]
            sent = (client.send(request, 0.0, answer) for request, answer in zip(requests, into, strict=True))
            return list(await asyncio.gather(*sent))

    return asyncio.run(run())


def test_tokens_are_the_servers_and_every_event_is_noted(server: RunningServer) -> None:
    answer = StreamedAnswer()
    [timing] = send(Target(server.url), BenchRequest(PROMPT, 6, {"return_token_ids": True}), answers=[answer])
    assert isinstance(timing, Timing)
    assert (timing.num_prompt_tokens, timing.num_output_tokens, timing.num_cached_tokens) == (16, 6, 0)
    assert len(timing.came_s) == len(answer.token_ids) == 6
    assert timing.due_s == 0.0 < timing.sent_s <= timing.came_s[0] <= timing.came_s[-1]


def test_many_at_once_are_all_accounted_for(server: RunningServer) -> None:
    requests = [BenchRequest([*PROMPT, number], 1 + number % 5) for number in range(40)]
    outcomes = send(Target(server.url + "/v1/", MODEL), *requests)
    assert [outcome.num_output_tokens for outcome in outcomes] == [request.output_len for request in requests]


def test_chats(server: RunningServer) -> None:
    answer = StreamedAnswer()
    target = Target(server.url, endpoint="chat")
    messages = [{"role": "user", "content": "hello"}]
    one, two = send(target, BenchRequest("hello", 3), BenchRequest(messages, 3), answers=[answer, StreamedAnswer()])
    assert isinstance(one, Timing)
    assert isinstance(two, Timing)
    assert one.num_prompt_tokens == two.num_prompt_tokens > 0
    assert answer.text
    assert answer.usage is not None


def test_answers_may_be_shorter_where_that_is_asked_for(server: RunningServer) -> None:
    [outcome] = send(Target(server.url, ignore_eos=False), BenchRequest(PROMPT, 5))
    assert isinstance(outcome, Timing)
    assert 1 <= outcome.num_output_tokens <= 5


def test_refusals_are_of_a_kind(server: RunningServer) -> None:
    wrong, missing = send(
        Target(server.url, "nobody"), BenchRequest(PROMPT, 2), BenchRequest(PROMPT, 2, {"temprature": 1})
    )
    assert (wrong.kind, missing.kind) == ("http_404", "http_400")
    assert "temprature" in missing.message
    with running(api_keys=["secret"]) as locked:
        assert [outcome.kind for outcome in send(Target(locked.url, MODEL), BenchRequest(PROMPT, 2))] == ["http_401"]
        [answered] = send(Target(locked.url, api_key="secret"), BenchRequest(PROMPT, 2))
        assert isinstance(answered, Timing)


@contextmanager
def saying(answer: bytes, *, hang: bool = False) -> Iterator[str]:
    """A server that says this to whatever comes, and then closes, or does not."""
    started, loops, urls = threading.Event(), [], []

    async def serve() -> None:
        over = asyncio.Event()
        loops.append((asyncio.get_running_loop(), over))

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            # What is left unread would make the system reset the connection.
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n", 1)[0]))
            writer.write(answer)
            await writer.drain()
            if hang:
                await over.wait()
            writer.close()

        listener = await asyncio.start_server(talk, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        started.set()
        await over.wait()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield urls[0]
    finally:
        loop, over = loops[0]
        loop.call_soon_threadsafe(over.set)
        thread.join(30)


def events(*events: object) -> bytes:
    return HEAD + b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


TOKEN = {"choices": [{"index": 0, "text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def test_a_plain_server() -> None:
    with saying(events(TOKEN, TOKEN, USAGE) + b": a comment\n\n" + DONE) as url:
        [outcome] = send(Target(url, "m"), BenchRequest(PROMPT, 2))
    assert isinstance(outcome, Timing)
    assert (len(outcome.came_s), outcome.num_output_tokens, outcome.num_cached_tokens) == (2, 2, None)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"HTTP/1.1 503 Unavailable\r\ncontent-length: 4\r\n\r\nfull", "http_503"),
        (events(TOKEN, TOKEN, USAGE), "disconnected"),
        (events(TOKEN, {"error": {"message": "the engine died"}}) + DONE, "server_error"),
        (events(TOKEN, TOKEN) + DONE, "no_usage"),
        (HEAD + b"data: {no json\n\n" + DONE, "malformed"),
        (events([1, 2]) + DONE, "malformed"),
        (events(TOKEN, {"choices": [], "usage": {"prompt_tokens": 16}}) + DONE, "malformed"),
        (events(USAGE) + DONE, "empty"),
        (events(TOKEN, {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 1}}) + DONE, "length"),
        (b"nonsense\r\n\r\n", "disconnected"),
        (b"", "disconnected"),
    ],
)
def test_what_goes_wrong_is_a_failure_of_a_kind(said: bytes, kind: str) -> None:
    with saying(said) as url:
        [outcome] = send(Target(url, "m"), BenchRequest(PROMPT, 2))
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind
    assert outcome.message


def test_a_role_alone_is_no_token_of_a_chat() -> None:
    chat = [{"role": "assistant", "content": ""}, {"content": "a"}, {"tool_calls": [{"index": 0}]}, {}]
    with saying(events(*({"choices": [{"index": 0, "delta": delta}]} for delta in chat), USAGE) + DONE) as url:
        [outcome] = send(Target(url, "m", endpoint="chat"), BenchRequest("hello", 2))
    assert isinstance(outcome, Timing)
    assert len(outcome.came_s) == 2


def test_a_server_that_does_not_come_to_an_end_times_out() -> None:
    with saying(events(TOKEN), hang=True) as url:
        [outcome] = send(Target(url, "m", timeout_s=0.05), BenchRequest(PROMPT, 2))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "timeout"


def test_nobody_there() -> None:
    with saying(b"") as url:
        pass
    [outcome] = send(Target(url, "m"), BenchRequest(PROMPT, 2))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "connect"
    with pytest.raises(WeftError, match="--model"):
        send(Target(url), BenchRequest(PROMPT, 2))
