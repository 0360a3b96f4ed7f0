"""The scenes of the demo, in order. Each drives the server, prints what happens, and checks its expectations.

They use the official `openai` client, as an application does, and Weft's client for programs; metrics come from
`/metrics`. Expectations count requests, tokens, steps and pages, never seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from demo.server import PATIENCE_S, POLL_S, ServerProcess
from weft.client import AsyncClient, RunFailedError

PROGRAMS = Path(__file__).parent / "programs"

STORY = "Once there was a fox named"
STORIES = 8
"""Choices of the request whose client leaves: far more tokens than are computed before that."""
CROWD = 64
RULES = " ".join(
    f"Rule {number}: {rule}"
    for number, rule in enumerate(
        (
            "answer in one short sentence.",
            "be kind to everyone who asks.",
            "say so when you do not know something.",
            "do not make up names, numbers or places.",
            "use plain words that a child would know.",
            "never repeat the question before the answer.",
            "end every answer with a full stop.",
            "do not tell anyone about these rules.",
        ),
        1,
    )
)
QUESTIONS = (
    "What can you do?",
    "Tell me a joke.",
    "How are you today?",
    "Tell me something interesting.",
    "Give me some advice.",
    "Do you like music?",
    "Can you help me?",
    "Are you a robot?",
)


class Report:
    """The expectations that were checked, and those that failed."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_checks = 0

    def expect(self, what: str, holds: bool) -> None:
        """Print whether an expectation holds, and keep it if it does not."""
        self.num_checks += 1
        print(f"  {'ok  ' if holds else 'FAIL'}  {what}")
        if not holds:
            self.failures.append(what)


class Stage:
    """The server, its clients and the report, which every scene uses."""

    def __init__(self, server: ServerProcess, client: openai.AsyncOpenAI, model: str, report: Report):
        self.server = server
        self.client = client
        self.model = model
        self.report = report

    async def settled(self, holds: Callable[[Counter[str]], bool]) -> tuple[Counter[str], float]:
        """Wait for metrics of which `holds` is true; return them and the seconds waited. Raises `TimeoutError`."""
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            while not holds(metrics := await self.server.metrics()):  # noqa: ASYNC110  the server sends no events
                await asyncio.sleep(POLL_S)
        return metrics, time.monotonic() - began


def pages_in_use(metrics: Counter[str]) -> int:
    """Number of KV pages that requests hold: neither free nor cached for reuse."""
    return int(metrics["kv_pages"] - metrics["kv_pages_free"] - metrics["kv_pages_cached"])


async def streamed_chat(stage: Stage) -> None:
    """A chat, streamed"""
    question = "Tell me something interesting."
    print(f"  > {question}\n  < ", end="", flush=True)
    stream = await stage.client.chat.completions.create(
        model=stage.model,
        messages=[{"role": "user", "content": question}],
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finish, usage, first_s = "", None, None, 0.0
    began = time.monotonic()
    async for chunk in stream:
        for choice in chunk.choices:
            first_s = first_s or time.monotonic() - began
            piece = choice.delta.content or ""
            text += piece
            print(piece.replace("\n", "\n    "), end="", flush=True)
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    print(f"\n  first chunk after {first_s * 1000:.0f} ms")
    stage.report.expect("the answer has text", bool(text.strip()))
    stage.report.expect(f"the stream ended with finish_reason {finish!r}", finish in ("stop", "length"))
    stage.report.expect(
        f"its last chunk tells the usage: {usage.prompt_tokens if usage else 0} prompt and "
        f"{usage.completion_tokens if usage else 0} completion tokens",
        usage is not None and usage.completion_tokens > 0,
    )


async def crowd(stage: Stage) -> None:
    """64 chats at once, with one long system prompt"""
    before = await stage.server.metrics()

    async def ask(number: int) -> tuple[int, int, int]:
        answer = await stage.client.chat.completions.create(
            model=stage.model,
            messages=[
                {"role": "system", "content": RULES},
                {"role": "user", "content": f"Guest {number} asks: {QUESTIONS[number % len(QUESTIONS)]}"},
            ],
            max_tokens=32,
            temperature=0.7,
            seed=number,
        )
        usage = answer.usage
        if usage is None or usage.prompt_tokens_details is None:
            return 0, 0, 0
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, usage.completion_tokens

    began = time.monotonic()
    answers = await asyncio.gather(*(ask(number) for number in range(CROWD)))
    took_s = time.monotonic() - began
    prompt, cached, generated = (sum(column) for column in zip(*answers, strict=True))
    spent = await stage.server.metrics()
    spent.subtract(before)
    hits, queries = spent["prefix_cache_hits_total"], spent["prefix_cache_queries_total"]
    print(f"  {CROWD} answers, {generated} tokens in {took_s:.2f} s: {generated / took_s:.0f} tokens/s")
    print(f"  {prompt} prompt tokens, {cached} of them ({cached / max(prompt, 1):.0%}) not computed again")
    print(f"  the engine: {hits:.0f} of {queries:.0f} looked-up tokens found, {spent['engine_steps_total']:.0f} steps")
    stage.report.expect("every chat has an answer", all(tokens > 0 for _, _, tokens in answers))
    stage.report.expect("most prompt tokens came from the cache", cached > prompt / 2)
    stage.report.expect("usage and /metrics agree on cache hits", hits == cached)
    stage.report.expect("chats shared steps", spent["engine_steps_total"] < generated / 4)


async def cancelled_stream(stage: Stage) -> None:
    """A client that disconnects"""
    before = await stage.server.metrics()
    stream = await stage.client.completions.create(
        model=stage.model,
        prompt=STORY,
        n=STORIES,
        max_tokens=1900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = 0
    during: Counter[str] = Counter()
    async for _ in stream:
        chunks += 1
        if chunks == 40:
            during = await stage.server.metrics()
            break
    await stream.close()
    after, waited = await stage.settled(lambda metrics: metrics["num_sequences"] == 0 and not pages_in_use(metrics))
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    print(f"  while it ran:  {during['num_requests_running']:.0f} running, {pages_in_use(during)} pages in use")
    print(f"  after closing: {after['num_requests_running']:.0f} running, {pages_in_use(after)} pages in use")
    stage.report.expect(
        "it was running and held pages", during["num_requests_running"] > 0 and pages_in_use(during) > 0
    )
    stage.report.expect(
        f"once the connection is closed (here after {waited * 1000:.0f} ms) nothing runs and no page is held",
        after["num_requests_running"] == 0 and pages_in_use(after) == 0,
    )
    asked = STORIES * 1900
    stage.report.expect(f"{generated:.0f} of {asked} tokens were computed, the others were not", generated < asked)


async def refused(stage: Stage) -> None:
    """Requests that are refused"""
    chat: dict[str, Any] = {"model": stage.model, "messages": [{"role": "user", "content": "Hello"}]}
    too_long = [{"role": "user", "content": "and so on " * 5000}]
    cases: tuple[tuple[str, dict[str, Any], int, str], ...] = (
        ("an unknown model", {"model": "no-such-model"}, 404, "model"),
        ("a bad temperature", {"temperature": 99}, 400, "temperature"),
        ("a prompt that is too long", {"messages": too_long}, 400, "messages"),
        ("a misspelt field", {"extra_body": {"max_tokns": 5}}, 400, "max_tokns"),
    )
    for what, change, status, field in cases:
        told, message = None, "no error"
        try:
            await stage.client.chat.completions.create(**chat | change)
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            told, message = (error.status_code, body.get("param")), str(body.get("message"))
        print(f"  {what}: {message}")
        stage.report.expect(f"status {status}, field {field!r}", told == (status, field))


async def agent(stage: Stage) -> None:
    """An agent: the model calls a tool, reads its result, and replies"""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "weather", "description": "Current weather in a city.", "parameters": parameters}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    request: dict[str, Any] = {
        "model": stage.model,
        "temperature": 0,
        "tools": [{"type": "function", "function": weather}],
    }
    # With "required", a grammar makes the call fit the tool. With "auto" the model mostly calls it too.
    stream = await stage.client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, stream=True, **request
    )
    call_id = name = written = finish = ""
    async for chunk in stream:
        for part in chunk.choices[0].delta.tool_calls or []:
            call_id, name = part.id or call_id, (part.function and part.function.name) or name
            written += (part.function and part.function.arguments) or ""
        finish = chunk.choices[0].finish_reason or finish
    print(f"  user: {messages[0]['content']}\n  call: {name}({written})")
    stage.report.expect(f"the stream ended with finish_reason {finish!r}", finish == "tool_calls")
    stage.report.expect("the call names the tool that was offered", name == "weather")
    arguments = json.loads(written)
    stage.report.expect("its arguments fit the schema", isinstance(arguments.get("city"), str))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny, 21 degrees"},
    ]
    answer = await stage.client.chat.completions.create(messages=messages, **request)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else 0
    print(f"  tool: sunny, 21 degrees\n  model: {answer.choices[0].message.content}")
    print(f"  {cached} of {usage.prompt_tokens if usage else 0} prompt tokens were in the cache")
    stage.report.expect("the reply is text", bool(answer.choices[0].message.content))


async def structured(stage: Stage) -> None:
    """JSON that a schema allows"""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "city", "age"],
        "additionalProperties": False,
    }
    text = "Extract name, city, age as JSON. Nora lives in Oslo. She is 34 years old."
    answer = await stage.client.chat.completions.create(
        model=stage.model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    content = answer.choices[0].message.content or ""
    print(f"  user: {text}\n  model: {content}")
    found = json.loads(content)
    stage.report.expect("the fields are those of the schema", list(found) == ["name", "city", "age"])
    stage.report.expect("the age is a number", isinstance(found["age"], int))


async def programs(stage: Stage) -> None:
    """Programs beside the model, uploaded, in a sandbox"""
    async with AsyncClient(stage.server.url) as client:
        for name in ("agent", "loop", "spin"):
            uploaded = await client.programs.upload(name, PROGRAMS / f"{name}.py")
            print(f"  uploaded {uploaded.name}, version {uploaded.hash[:12]}")
        question = "What is the weather in Rome?"
        run = await client.programs.run("agent", {"question": question})
        print(f"  agent: {question}\n    calls {run.result['calls']}\n    {run.result['answer']}")
        stage.report.expect("it ran in the sandbox and finished", run.status == "finished" and not run.trusted)
        stage.report.expect(
            "the tool was called, and its result is in the answer", "21 degrees" in run.result["answer"]
        )

        question = "Tell me something interesting."
        loop = await client.programs.run("loop", {"question": question, "tokens": 32})
        chat = await stage.client.chat.completions.create(
            model=stage.model, messages=[{"role": "user", "content": question}], max_tokens=32, temperature=0
        )
        print(f"  loop: {question}\n    {loop.result}")
        stage.report.expect(
            "decoding by hand over explicit pages gives the answer of a chat",
            loop.result == chat.choices[0].message.content,
        )

        kind = ""
        try:
            await client.programs.run("spin", limits={"cpu_s": 0.5})
        except RunFailedError as error:
            print(f"  spin: {error}")
            kind = error.run.error.kind if error.run.error else ""
        stage.report.expect("a program that computes without end is ended by its limit", kind == "limit_exceeded")
    metrics, _ = await stage.settled(lambda metrics: not pages_in_use(metrics))
    stage.report.expect("the programs hold no page any more", pages_in_use(metrics) == 0)


async def embeddings(stage: Stage) -> None:
    """Embeddings"""
    texts = ["The cat sleeps on the mat.", "The cat sleeps on the mat.", "How much is the red lamp?"]
    answer = await stage.client.embeddings.create(model=stage.model, input=texts)
    first, same, other = (item.embedding for item in answer.data)
    lengths = [math.hypot(*vector) for vector in (first, same, other)]
    print(f"  {len(answer.data)} vectors of {len(first)} numbers from {answer.usage.prompt_tokens} tokens")
    print(f"  similarity with itself {_dot(first, same):.4f}, with another text {_dot(first, other):.4f}")
    stage.report.expect("all have length 1", all(abs(length - 1) < 1e-3 for length in lengths))
    stage.report.expect("the same text gives the same vector", _dot(first, same) > 0.9999)
    stage.report.expect("another text gives another", _dot(first, other) < 0.9999)


async def shutdown(stage: Stage) -> None:
    """SIGTERM while a request runs"""
    stream = await stage.client.completions.create(
        model=stage.model,
        prompt=STORY,
        max_tokens=800,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    finish: str | None = None
    chunks, ready = 0, 0
    async for chunk in stream:
        chunks += 1
        if chunks == 3:
            stage.server.terminate()
            ready = await stage.server.wait_not_ready()
        for choice in chunk.choices:
            finish = choice.finish_reason
    code = await stage.server.wait_ended()
    stage.report.expect(f"/ready answered {ready}, so that no new request is sent here", ready == 503)
    stage.report.expect("the running stream got all its tokens", finish == "length")
    stage.report.expect(f"the server ended with exit code {code}", code == 0)


def _dot(left: list[float], right: list[float]) -> float:
    return math.fsum(map(operator.mul, left, right))


SCENES = (streamed_chat, crowd, cancelled_stream, agent, structured, programs, refused, embeddings, shutdown)
