"""Each endpoint called as a function gives what the HTTP route sends for the same body: answer, stream and error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from tests.server.conftest import RunningServer, running, sse
from weft.endpoints.errors import ErrorResponse, answer_of
from weft.endpoints.record import Record
from weft.endpoints.table import ENDPOINTS

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now"}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "seed": 1, "max_tokens": 4}),
    (CHAT, {"messages": MESSAGES, "seed": 1, "max_tokens": 4, "n": 2, "logprobs": True, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "seed": 1, "max_tokens": 4, "echo": True, "logprobs": 1}),
    ("/v1/embeddings", {"input": ["a", "bc"]}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/detokenize", {"tokens": [104, 105]}),
]
REFUSED: list[tuple[str, Any]] = [
    (CHAT, {"messages": MESSAGES, "model": "other"}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 10**6}),
    (CHAT, {"messages": MESSAGES, "temprature": 1}),
    (COMPLETIONS, ["no object"]),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}),
    ("/v1/embeddings", {"input": []}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
        server.assert_nothing_left()


async def called(server: RunningServer, path: str, body: Any) -> Any:
    """What the endpoint answers; the list of its events where it streams."""
    endpoint, models = ENDPOINTS[path], server.service.models
    record = Record("r1", time.monotonic(), body_bytes=len(msgspec.json.encode(body)))
    reply = await endpoint.create(endpoint.decode(body, models), record, models)
    if isinstance(reply, msgspec.Struct):
        return msgspec.json.decode(msgspec.json.encode(reply))
    async with aclosing(reply):
        values = [value async for events in reply for value in events.values]
    return [msgspec.json.decode(msgspec.json.encode(value)) for value in values]


def call(server: RunningServer, path: str, body: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(called(server, path, body), server.server.loop).result(30)


def without_marks(value: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two equal requests."""
    return {name: entry for name, entry in value.items() if name not in ("id", "created")}


@pytest.mark.parametrize(("path", "body"), ANSWERED)
def test_an_answer(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    over_http = server.post(path, body)
    assert over_http.status_code == 200
    assert without_marks(call(server, path, body)) == without_marks(over_http.json())


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body in ANSWERED if path in (CHAT, COMPLETIONS)])
def test_a_stream(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "n": 1, "prompt": "ab"}
    body.pop("prompt" if path == CHAT else "messages", None)
    told = sse(server.post(path, body).text)
    assert told.pop() == "[DONE]"
    events = [without_marks(json.loads(event)) for event in told]
    # How tokens gather in events depends on who is faster; what they add up to does not.
    assert added_up(map(without_marks, call(server, path, body))) == added_up(events)


def added_up(events: Any) -> tuple[Any, ...]:
    text, tokens, ends, usages = "", [], [], []
    for event in events:
        usages += [event["usage"]] if event["usage"] else []
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            tokens += choice.get("token_ids", [])
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, tokens, ends, usages


def test_what_the_chat_template_has_read_is_freed_before_the_answer_begins(server: RunningServer) -> None:
    endpoint, models = ENDPOINTS[CHAT], server.service.models
    fields = {
        "tools": [TOOL],
        "tool_choice": "none",
        "documents": [{"text": "a"}],
        "chat_template_kwargs": {"deep": [[[]]] * 100},
    }
    body = endpoint.decode({"messages": MESSAGES, "max_tokens": 4, "stream": True} | fields, models)

    async def inputs() -> list[Any]:
        async with aclosing(await endpoint.create(body, Record("r1", time.monotonic(), body_bytes=100), models)):
            return [body.messages, body.tools, body.documents, body.chat_template_kwargs]

    found = asyncio.run_coroutine_threadsafe(inputs(), server.server.loop).result(30)
    assert not any(found)


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_an_error(server: RunningServer, path: str, body: Any) -> None:
    over_http = server.post(path, body)
    with pytest.raises(Exception) as raised:  # noqa: PT011  any error has an answer
        call(server, path, body)
    told = answer_of(raised.value, "r1")
    assert 400 <= told.status == over_http.status_code < 500
    assert msgspec.json.encode(ErrorResponse(told.body)) == over_http.content


def test_a_cancelled_call_gives_everything_back() -> None:
    async def cancelled(server: RunningServer) -> None:
        task = asyncio.create_task(called(server, CHAT, {"messages": MESSAGES, "max_tokens": 4}))
        while not server.engine.sequences:  # noqa: ASYNC110  the fake engine has no event for it
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with running(auto=False) as server:
        asyncio.run_coroutine_threadsafe(cancelled(server), server.server.loop).result(30)
        server.assert_nothing_left()
