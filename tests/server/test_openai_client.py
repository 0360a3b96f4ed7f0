"""The official client against a real server: what users have, unchanged."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

import openai
import pytest

from tests.server.conftest import MODEL, RunningServer, ids, running
from tests.server.test_disconnect import connect, read_to_end, read_until

MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script(ids("hello")))
    answer = server.openai().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 21
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == 27
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("chatcmpl-")


def test_chat_stream(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script(ids("naïve 🧵")))
    stream = server.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "naïve 🧵"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("naïve 🧵".encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_equals_whole(server: RunningServer) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 50, "seed": 7, "n": 3}
    whole = server.openai().chat.completions.create(**fields)
    texts = ["", "", ""]
    for chunk in server.openai().chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3


def test_continuous_usage(server: RunningServer) -> None:
    stream = server.openai().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    # The role's event says nothing yet.
    assert (counts[0], counts[1] > 0, counts[-1]) == (0, True, 5)


def test_what_was_cached_is_told_once_it_is_known(stepped: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 5, "stream": True, "stream_options": options}
    connection = connect(stepped, "/v1/chat/completions", body)
    stepped.wait_until(lambda: bool(stepped.engine.sequences))
    stepped.on_loop(stepped.engine.step)
    text = read_until(connection, b"content")
    stepped.on_loop(lambda: stepped.engine.step(200))
    text += read_to_end(connection)
    connection.close()
    told = [
        json.loads(line.removeprefix("data: ")) for line in text.decode().splitlines() if line.startswith("data: {")
    ]
    known = ["prompt_tokens_details" in event["usage"] for event in told]
    assert (known[:2], known[-2:]) == ([False, False], [True, True])
    assert known == sorted(known)
    assert told[-1]["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "continued_tokens": 0,
        "host_tokens": 0,
        "recomputed_tokens": 0,
        "new_tokens": 21,
        "first_different_token": None,
    }


def test_seed_makes_requests_reproducible_and_absence_varies(server: RunningServer) -> None:
    def text(**fields) -> str | None:
        answer = server.openai().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, **fields)
        return answer.choices[0].message.content

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0)


def test_chat_logprobs(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script([0xC3, 0xA9, ord("a")]))
    answer = server.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "éa"
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9], [ord("a")]]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert content[2].token == "a"
    assert content[2].logprob == -0.5


def test_stream_logprobs(server: RunningServer) -> None:
    stream = server.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=7, logprobs=True, stream=True
    )
    entries = [entry for c in stream for choice in c.choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == 7
    assert all(entry.top_logprobs == [] for entry in entries)


def test_stop_string_and_stop_reason(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script(ids("one END two"), ids("one END two")))
    client = server.openai()
    cut = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=50, stop="END")
    assert cut.choices[0].message.content == "one "
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra["stop_reason"] == "END"
    kept = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=50,
        stop=["END"],
        extra_body={"include_stop_str_in_output": True},
    )
    assert kept.choices[0].message.content == "one END"


def test_completion_with_echo_and_logprobs(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script(ids("cd")))
    answer = server.openai().completions.create(model=MODEL, prompt="ab", max_tokens=2, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abcd"
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.finish_reason == "length"


def test_completion_stream_of_several_prompts(server: RunningServer) -> None:
    fields = {"model": MODEL, "prompt": ["ab", "cd", "ef"], "n": 2, "max_tokens": 6, "seed": 3}
    whole = server.openai().completions.create(**fields)
    texts = [""] * 6
    for chunk in server.openai().completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    # With a seed, a prompt gives in company what it gives alone.
    alone = server.openai().completions.create(**fields | {"prompt": "cd"})
    assert [choice.text for choice in alone.choices] == texts[2:4]


def test_completion_defaults_to_sixteen_tokens(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt="ab")
    assert answer.usage.completion_tokens == 16


def test_embeddings(server: RunningServer) -> None:
    client = server.openai()
    # The client asks for base64 by itself and decodes it.
    both = client.embeddings.create(model=MODEL, input=["ab", "cdef"])
    assert [item.index for item in both.data] == [0, 1]
    assert len(both.data[0].embedding) == 8
    assert sum(x * x for x in both.data[0].embedding) == pytest.approx(1, abs=1e-6)
    assert both.usage.prompt_tokens == 6
    floats = client.embeddings.create(model=MODEL, input=[97, 98], encoding_format="float", dimensions=3)
    assert len(floats.data[0].embedding) == 3
    raw = server.post("/v1/embeddings", {"input": "ab", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<8f", base64.b64decode(raw)) == pytest.approx(both.data[0].embedding)


def test_models(server: RunningServer) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_errors_have_their_classes(server: RunningServer) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    assert MODEL in unknown.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=99)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    assert "4096" in long.value.message
    assert "5000" in long.value.message


def test_client_retries_when_the_queue_is_full(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.fail_next("overloaded", "the queue is full"))
    answer = server.openai(max_retries=2).chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_a_full_queue_is_429_before_a_stream_begins(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.fail_next("overloaded", "the queue is full"))
    with pytest.raises(openai.RateLimitError) as full:
        server.openai().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, stream=True)
    assert int(full.value.response.headers["retry-after"]) >= 1
    assert "queue is full" in full.value.message


def test_async_client(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async with server.async_openai() as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, seed=1)
            text = (await whole).choices[0].message.content or ""
            parts = []
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=9, seed=1, stream=True
            )
            async for chunk in stream:
                parts += [choice.delta.content or "" for choice in chunk.choices]
            return [text, "".join(parts)]

    text, streamed = asyncio.run(ask())
    assert text == streamed
    assert len(text) == 9


def test_key() -> None:
    with running(api_keys=["alice=secret-key"]) as server:
        assert server.openai(api_key="secret-key").models.list().data
        with pytest.raises(openai.AuthenticationError) as refused:
            server.openai(api_key="other").models.list()
        assert refused.value.code == "invalid_api_key"
