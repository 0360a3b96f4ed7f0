"""Processes are killed while clients stream: every request ends, nothing is left, and the next request is answered."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.cli.test_serve import SMALL, free_port, serving

pytestmark = pytest.mark.slow
BODY = {"prompt": "Once upon a time", "n": 4, "max_tokens": 1900, "ignore_eos": True}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "story",
        "schema": {
            "type": "object",
            "properties": {
                "words": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}, "minItems": 20}
            },
            "required": ["words"],
            "additionalProperties": False,
        },
    },
}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3}


def events(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def engines_of(front: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(front).children() if "weft.engine.process" in child.cmdline()]


def engine_of(front: int) -> psutil.Process:
    [engine] = engines_of(front)
    return engine


def lines_of(client: httpx.Client, name: str) -> list[str]:
    return [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]


def until_running(client: httpx.Client, count: int, asked: Sequence[Future[Any]]) -> None:
    """Until so many choices of what was asked run, on all engines together."""
    while sum(float(line.split()[-1]) for line in lines_of(client, "weft:num_requests_running{")) < count:
        assert not all(future.done() for future in asked), "all have ended, and were never seen to run"


def test_a_killed_front() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        with serving(*SMALL, port=port, TMPDIR=folder) as (front, client):
            assert list(Path(folder).glob("weft-*/engine-*"))
            engine = engine_of(front.pid)
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                stream = events(answer)
                next(stream)
                front.send_signal(signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    list(stream)
        # At once, while the engine may still be about to end.
        with serving(*SMALL, port=port, TMPDIR=folder) as (front, client):
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            assert not psutil.wait_procs([engine], timeout=60)[1]
            assert len(list(Path(folder).iterdir())) == 1
            front.send_signal(signal.SIGTERM)
            front.communicate(timeout=60)
        assert not list(Path(folder).iterdir())


def chat_body(number: int, **fields: object) -> dict[str, object]:
    body: dict[str, object] = {
        "model": "weft-tiny",
        "messages": [{"role": "user", "content": f"Tell me the story of number {number}."}],
        "seed": number,
        "temperature": 1.0,
        "max_tokens": 240,
        "extra_body": {"ignore_eos": True},
    }
    return body | KINDS[number % len(KINDS)] | fields


KINDS: list[dict[str, object]] = [
    {},
    {"presence_penalty": 0.8, "logprobs": True, "top_logprobs": 2},
    {"n": 2},
    {"response_format": SCHEMA, "extra_body": {}},
]
Told = tuple[list[str], list[str], tuple[int, int]]


def streamed(client: openai.OpenAI, number: int, begun: threading.Event) -> Told:
    """Texts, ends, and tokens of prompt and answer."""
    texts, ends = defaultdict[int, str](str), defaultdict[int, str](str)
    body = chat_body(number, stream=True, stream_options={"include_usage": True})
    usage = None
    for chunk in client.chat.completions.create(**body):  # type: ignore[call-overload]
        begun.set()
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    return (
        [texts[i] for i in sorted(texts)],
        [ends[i] for i in sorted(ends)],
        (usage.prompt_tokens, usage.completion_tokens),
    )


def whole(client: openai.OpenAI, number: int) -> Told:
    answer = client.chat.completions.create(**chat_body(number))  # type: ignore[call-overload]
    texts = [choice.message.content or "" for choice in answer.choices]
    ends = [choice.finish_reason for choice in answer.choices]
    return texts, ends, (answer.usage.prompt_tokens, answer.usage.completion_tokens)


def test_chats_outlive_a_killed_engine() -> None:
    """Streamed or not, running or waiting, with penalties, choices and grammars: the answers are the undisturbed ones.

    In float64, where what is computed does not depend on the batch.
    """
    with serving(*SMALL, "--dtype", "float64") as (front, client), ThreadPoolExecutor(64) as pool:
        api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="secret", max_retries=0, timeout=200)
        undisturbed = list(pool.map(lambda number: whole(api, number), range(8)))
        first = engine_of(front.pid)
        begun = [threading.Event() for _ in undisturbed]
        streams = [pool.submit(streamed, api, number, begun[number]) for number in range(8)]
        wholes = [pool.submit(whole, api, number) for number in range(8)]
        for event in begun[:4]:
            event.wait()
        until_running(client, 8, streams + wholes)
        first.kill()
        assert [future.result(200) for future in streams] == undisturbed
        assert [future.result(200) for future in wholes] == undisturbed
        assert engine_of(front.pid).pid != first.pid


def test_a_killed_engine_without_patience() -> None:
    with serving(*SMALL, WEFT_SERVER_ENGINE_WAIT_S="0") as (front, client), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.post, "/v1/completions", json=BODY)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            stream = events(answer)
            next(stream)
            until_running(client, 8, [whole])
            engine = engine_of(front.pid)
            engine.kill()
            *_, last = stream
            error = json.loads(last)["error"]
        assert (answer.status_code, error["type"], error["code"]) == (200, "server_error", "engine_unavailable")
        refused = whole.result(60)
        assert refused.status_code == 503
        assert refused.json()["error"] == error
        assert int(refused.headers["retry-after"]) > 0
        while client.get("/ready").status_code != 200:
            assert front.poll() is None
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        assert engine_of(front.pid).pid != engine.pid


def test_a_killed_replica_interrupts_only_its_own() -> None:
    """Streams on both engines go on to their ends, the one of the killed engine on its successor."""
    with serving(*SMALL, "--replicas", "2") as (front, client), ThreadPoolExecutor(4) as pool:
        while not all(line.endswith(" 1.0") for line in lines_of(client, "weft:engine_up{")):
            assert front.poll() is None
        first = engines_of(front.pid)
        assert len(first) == 2
        long = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        prompts = [f"{name}: Once upon a time a weaver went to the sea and found a shell." for name in "ab"]
        answers = [pool.submit(client.post, "/v1/completions", json=long | {"prompt": prompt}) for prompt in prompts]
        until_running(client, 2, answers)
        first[0].kill()
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        for answer in answers:
            assert answer.result(100).status_code == 200
            assert answer.result().json()["usage"]["completion_tokens"] == 1500
        now = {engine.pid for engine in engines_of(front.pid)}
        assert len(now & {engine.pid for engine in first}) == 1
