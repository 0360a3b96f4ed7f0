"""The same workflow on a model of this process, on a server of ours over HTTP, and call by call by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

import weft
from tests.programs.virtual_time import run_virtually
from tests.server.conftest import RunningServer, running
from tests.workflow.naive import evaluate
from weft import ops
from weft.abi.errors import EngineDead, InvalidRequest, Overloaded, UnknownModel, Unsupported, WeftError
from weft.config import EngineConfig
from weft.engine.inline import InlineEngine
from weft.llm import LLM
from weft.server import auth
from weft.tokenizers import chats
from weft.tokenizers.load import load_tokenizer
from weft.tokenizers.tokenizer import Tokenizer
from weft.workflow import api
from weft.workflow.actuals import CallUsage
from weft.workflow.backend.endpoint import MAX_ENCODED, EndpointBackend
from weft.workflow.backend.openai import OpenAIBackend
from weft.workflow.graph.nodes import FunctionNode
from weft.workflow.graph.values import RowError, split_ranges
from weft.workflow.run.backend import KnowsTokens
from weft.workflow.run.calls import (
    CHAT,
    COMPLETION,
    CallBound,
    EveryCallRefused,
    ModelAnswer,
    ModelRequest,
    request_with,
)

OPTIONS: dict[str, Any] = {"num_pages": 96, "threads": 1, "dtype": "float64", "max_context": 512}
ROWS = [{"topic": f"a lighthouse on island {number}", "tone": "kind"} for number in range(6)]
GOOD = {"good": {"type": "boolean"}}
VERDICT = {"type": "object", "properties": GOOD, "required": ["good"], "additionalProperties": False}


@weft.flow
def everything(topic: Any, tone: Any) -> Any:
    """Chats that go on, a prompt, a map, a loop and a switch."""
    first = ops.llm([ops.system(f"You are {tone}."), ops.user(f"Tell me about {topic}.")], max_tokens=12, temperature=0)
    second = ops.llm([first.chat, ops.user("Go on.")], max_tokens=8, seed=5, temperature=1)
    parts = topic.split(" ")
    notes = ops.map(lambda part: ops.llm(f"Say {part} {first}", max_tokens=4, temperature=0), parts)
    raw = ops.llm(prompt=f"Once upon {topic}", max_tokens=6, temperature=0)
    draft = ops.loop(lambda text: ops.llm(f"Revise: {text}", max_tokens=5, temperature=0), second, max_rounds=3)
    verdict = ops.llm(f"Is it good? {draft}", schema=VERDICT, max_tokens=30, temperature=0)
    choice = ops.switch(verdict.good, {True: lambda: raw, False: lambda: ops.text(f"no {first}")})
    return {"notes": notes, "second": second, "draft": draft, "verdict": verdict, "choice": choice}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = InlineEngine.from_config(EngineConfig(**OPTIONS))
    with running(engine=engine, tokenizer=load_tokenizer("weft-tiny"), names=["weft-tiny"]) as made:
        made.wait_until(lambda: made.service.ready)
        yield made
        made.wait_until(lambda: not made.runtime.num_sequences)


@pytest.fixture(scope="module")
def by_hand() -> list[dict[str, Any]]:
    """Each call alone, one after the other, on an engine that keeps no KV."""
    with LLM("weft-tiny", **OPTIONS | {"prefix_cache": False, "num_pages": 512}) as alone:

        def model(node: Any, request: Any) -> str:
            fields = {"temperature": request.get("temperature", 1.0), "max_tokens": request["max_tokens"]}
            fields |= {"seed": request["seed"]} if "seed" in request else {}
            if "prompt" in request:
                return alone.generate(request["prompt"], **fields)[0].text
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": request["schema"]}}
            fields |= {"response_format": form} if request["schema"] else {}
            return alone.chat(list(request["messages"]), **fields)[0].text

        return [evaluate(everything.graph, row, model=model) for row in ROWS]


def outputs(results: api.RunResults) -> list[Any]:
    assert results.errors == []
    return [result.outputs for result in results]


@pytest.mark.slow
def test_on_a_model_of_this_process(llm: LLM, by_hand: list[dict[str, Any]]) -> None:
    results = everything.run(ROWS, llm)
    assert outputs(results) == by_hand
    stats = llm.stats()
    assert stats.num_sequences == 0
    assert results.counts.calls.cached_tokens > 0
    assert results.counts.rows == len(ROWS)


@pytest.mark.slow
def test_on_a_server(server: RunningServer, by_hand: list[dict[str, Any]]) -> None:
    for url in (server.url, f"{server.url}/v1/"):
        results = everything.run(ROWS, on=url)
        assert outputs(results) == by_hand
    assert results.counts.calls.cached_tokens > 0


@weft.flow
def tokens(text: Any) -> Any:
    return ops.split(text, max_tokens=4), ops.split(text, max_tokens=5, overlap_tokens=2)


def test_parts_of_a_text_have_so_many_tokens_and_are_the_text(llm: LLM, server: RunningServer) -> None:
    texts = ["Once upon a time a weaver went to the sea.", "naïve 雪だるま ☃ says “hi” 👩‍👩‍👧", "😀é漢字" * 5, ""]
    rows = [{"text": text} for text in texts]
    here, there = (outputs(api.run(tokens.graph, rows, on)) for on in (llm, server.url))
    for text, both in zip(texts, here, strict=True):
        assert "".join(both["value_1"]) == text
        assert all(part and part in text for parts in both.values() for part in parts)
    assert there == here


@weft.flow
def few_tokens(text: Any) -> Any:
    return ops.split(text, max_tokens=5), ops.split(text, max_tokens=1), ops.split(text, max_tokens=6, overlap_tokens=5)


def test_parts_hold_no_more_characters_than_their_tokens_allow(llm: LLM, server: RunningServer) -> None:
    """Each of these characters has four tokens."""
    for on in (llm, server.url):
        (found,) = outputs(api.run(few_tokens.graph, [{"text": "🙂🙂a🙂"}], on))
        assert found["value_1"] == ["🙂", "🙂a", "🙂"]
        assert found["value_2"] == ["🙂", "🙂", "a", "🙂"]
        assert found["value_3"] == ["🙂", "🙂a", "a🙂"]


class Unheard:
    """A `CallProgress` that nobody looks at."""

    wants_text = False

    def __call__(self, start: object = None) -> None: ...

    def first_token(self) -> None: ...

    def text(self, piece: str) -> None: ...


def answered(backend: OpenAIBackend, request: ModelRequest) -> ModelAnswer | WeftError:
    async def main() -> ModelAnswer | WeftError:
        try:
            return await backend.complete(request, Unheard())
        except WeftError as error:
            return error
        finally:
            await backend.close()

    return asyncio.run(main())


def replying(status: int, body: bytes, **headers: str) -> OpenAIBackend:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body, headers={"retry-after": "", **headers})

    return OpenAIBackend("http://server/v1", "m", transport=httpx.MockTransport(reply))


SAY = ModelRequest(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
EVENT = b'data: {"choices": [{"delta": {"content": "h"}}]}\n\n'
DONE = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


@pytest.mark.parametrize(
    ("backend", "kind", "message"),
    [
        (replying(429, b'{"error": {"message": "full"}}', **{"retry-after": "9"}), Overloaded, "full"),
        (replying(503, b""), Overloaded, "status 503"),
        (replying(500, b"<html>"), EngineDead, "<html>"),
        (replying(400, b'{"error": {"message": "no such field"}}'), InvalidRequest, "no such field (status 400)"),
        (replying(401, b'{"error": {"message": "no such key"}}'), EveryCallRefused, "give the server's key as api_key"),
        (replying(200, EVENT), EngineDead, "ended before it was complete"),
        (replying(200, EVENT + b'data: {"error": {"message": "engine died"}}\n\n'), EngineDead, "engine died"),
        (replying(200, EVENT + b'data: {"error": "engine died"}\n\n'), EngineDead, "engine died"),
        (OpenAIBackend("http://127.0.0.1:9", "m"), EngineDead, "no answer from http://127.0.0.1:9"),
    ],
)
def test_errors_of_servers(backend: OpenAIBackend, kind: type[WeftError], message: str) -> None:
    error = answered(backend, SAY)
    assert type(error) is kind
    assert message in str(error)
    if "full" in message:
        assert error.retry_after_s == 9


@pytest.mark.parametrize(
    ("body", "used"),
    [
        (b'data:{"choices": [{"delta": {"content": "h"}, "finish_reason": "stop"}]}\n\ndata:[DONE]\n\n', 0),
        (EVENT.replace(b"}]}", b'}], "error": null}') + DONE, 0),
        (EVENT + DONE.replace(b"}]}", b'}], "usage": {"prompt_tokens": null, "completion_tokens": 2}}'), 2),
    ],
    ids=["no space", "null error", "null usage"],
)
def test_streams_as_others_write_them(body: bytes, used: int) -> None:
    answer = answered(replying(200, body), SAY)
    assert isinstance(answer, ModelAnswer)
    assert (answer.text, answer.usage.output_tokens) == ("h", used)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "http://server/v1/models did not answer with JSON"),
        (b'[{"id": "m"}]', "does not list its models"),
        (b'{"data": [null]}', "does not list its models"),
    ],
)
def test_addresses_that_are_no_such_server(content: bytes, message: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    error = answered(OpenAIBackend("http://server", transport=transport), SAY)
    assert isinstance(error, InvalidRequest)
    assert message in error.message


def test_an_answer_may_have_separators_of_lines() -> None:
    text = "one\u2028two\u0085"
    choice = {"delta": {"content": text}, "finish_reason": "stop"}
    event = json.dumps({"choices": [choice]}, ensure_ascii=False)
    assert answered(replying(200, f"data: {event}\n\ndata: [DONE]\n\n".encode()), SAY).text == text


@pytest.mark.parametrize(
    ("text", "schema", "mistake"),
    [
        ('{"good": true}', VERDICT, None),
        (
            '{"nom": "Ada"}',
            VERDICT,
            "the answer does not follow its schema: the value has no field 'good'; http://server",
        ),
        ("```json", VERDICT, None),  # said where the value is read
        ("[1]", {"type": "array", "prefixItems": [{"type": "string"}]}, None),
    ],
)
def test_answers_of_servers_that_ignore_a_schema_are_checked(text: str, schema: Any, mistake: str | None) -> None:
    event = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
    backend = replying(200, b"data: " + json.dumps(event).encode() + b"\n\n")
    request = request_with({"messages": SAY.body["messages"]}, schema)
    if mistake is None:
        assert isinstance(answered(backend, request), ModelAnswer)
    else:
        with pytest.raises(RowError, match=re.escape(mistake)):
            answered(backend, request)


def test_calls_of_tools_come_in_pieces() -> None:
    pieces = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x":'}},
        {"index": 1, "id": "c2", "function": {"name": "look", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": " 1}"}},
    ]
    events = [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]
    events += [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}]
    events += [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    answer = answered(replying(200, body), SAY)
    assert isinstance(answer, ModelAnswer)
    named = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in answer.tool_calls]
    assert named == [("c1", "find", '{"x": 1}'), ("c2", "look", "{}")]
    assert (answer.finish_reason, answer.usage) == ("tool_calls", CallUsage(7, 0, 5, prefill_tokens=7))


def test_a_server_with_several_models_needs_a_name() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models"
        return httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})

    error = answered(OpenAIBackend("http://server", transport=httpx.MockTransport(reply)), SAY)
    assert "serves a, b: name one" in str(error)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({"api_keys": ["alice=a"]}, {"api_key": "b"}, "give the server's key as api_key"),
        ({"names": ["one", "two"]}, {}, "serves one, two: name one with model"),
        ({"names": ["one", "two"]}, {"model": "three"}, "not serve the model 'three'; it serves one, two: name one"),
    ],
)
def test_what_refuses_every_call_ends_the_run_and_no_row(
    made: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tell = weft.flow(lambda topic: ops.llm(f"Tell me about {topic}.", max_tokens=2, temperature=0))
    parts = weft.flow(lambda topic: ops.split(topic, max_tokens=2))
    with running(**made) as server:
        with pytest.raises(EveryCallRefused, match=message):
            parts.run(ROWS, on=server.url, **options)
        for more in ({}, {"planning": False}, {"cache": tmp_path / "cache"}, {"out": tmp_path / "out.jsonl"}):
            with pytest.raises(EveryCallRefused, match=message):
                tell.run(ROWS, on=server.url, **options, **more)
        mended = {"api_key": "a"} if "api_keys" in made else {"model": "two"}
        assert not tell.run(ROWS, on=server.url, **mended, out=tmp_path / "out.jsonl").errors


def test_what_was_computed_before_a_model_was_refused_is_kept(tmp_path: Path) -> None:
    told: list[str] = []

    def note(topic: str) -> str:
        told.append(topic)
        return topic

    tell = weft.flow(lambda topic: ops.llm(f"Tell me about {ops.function(note, topic)}.", max_tokens=2))
    out = tmp_path / "out.jsonl"
    with running(names=["one"]) as server:
        for _ in range(2):
            with pytest.raises(EveryCallRefused, match="it serves one"):
                tell.run(ROWS[:1], on=server.url, model="two", out=out)
    assert len(told) == 1


def test_a_model_that_a_node_names_fails_the_node(tmp_path: Path) -> None:
    @weft.flow
    def both(topic: Any) -> Any:
        return {"good": ops.llm(topic, max_tokens=2), "bad": ops.llm(topic, max_tokens=2, model="three")}

    with running(names=["one", "two"]) as server:
        results = both.run(ROWS, on=server.url, model="one", out=tmp_path / "out.jsonl")
    assert len(results.errors) == len(ROWS)
    assert all(error.kind == "unknown_model" and "'three'" in error.message for error in results.errors)
    assert None not in results.column("good")


UNKNOWN = {"error": {"message": "The model `m` does not exist.", "code": "model_not_found"}}
BY_STATUS = {"object": "error", "message": "The model `m` does not exist.", "code": 404}


@pytest.mark.parametrize(
    ("status", "told", "names", "kind", "message"),
    [
        (404, UNKNOWN, ["a", "b"], EveryCallRefused, "does not serve the model 'm'; it serves a, b: name one"),
        (400, UNKNOWN, ["a"], EveryCallRefused, "it serves a"),
        (404, BY_STATUS, ["a"], EveryCallRefused, "it serves a"),
        (404, BY_STATUS, None, EveryCallRefused, "does not serve the model 'm': {"),
        (404, BY_STATUS, ["a", "m"], UnknownModel, "does not exist"),
        (404, {"detail": "Not Found"}, ["a"], InvalidRequest, "Not Found"),
        (404, {"error": {"message": "no method for images"}}, ["a"], InvalidRequest, "no method"),
    ],
)
def test_a_model_that_a_server_does_not_know(
    status: int, told: Any, names: list[str] | None, kind: type[WeftError], message: str
) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/models":
            return httpx.Response(status, json=told)
        return httpx.Response(404) if names is None else httpx.Response(200, json={"data": [{"id": n} for n in names]})

    def backend() -> OpenAIBackend:
        return OpenAIBackend("http://server/v1", "m", transport=httpx.MockTransport(reply))

    error = answered(backend(), SAY)
    assert type(error) is kind
    assert message in str(error)
    own = answered(backend(), SAY._replace(body={**SAY.body, "model": "m"}))
    assert not isinstance(own, EveryCallRefused)


def test_a_key_revoked_in_the_middle_ends_the_run_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, revoked, told = auth.find_tenant, False, []
    monkeypatch.setattr(auth, "find_tenant", lambda keys, given: None if revoked else find(keys, given))

    def revoke(answer: str, topic: str) -> str:
        nonlocal revoked
        told.append(topic)
        revoked = len(told) == len(ROWS)
        return answer

    @weft.flow
    def twice(topic: Any) -> Any:
        answer = ops.llm(f"Tell me about {topic}.", max_tokens=2, temperature=0)
        return ops.llm(f"Say more: {ops.function(revoke, answer, topic)}", max_tokens=2, temperature=0)

    options: dict[str, Any] = {"api_key": "a", "concurrency": weft.Concurrency(rows=1), "out": tmp_path / "out.jsonl"}
    with running(api_keys=["alice=a"]) as server:
        with pytest.raises(EveryCallRefused, match="give the server's key as api_key"):
            twice.run(ROWS, on=server.url, **options)
        assert len(options["out"].read_text().splitlines()) == len(ROWS) - 1
        revoked = False
        results = twice.run(ROWS, on=server.url, **options)
    assert not results.errors
    assert told == [row["topic"] for row in ROWS], "what the last row had computed is kept too"


def test_a_server_that_is_away_is_asked_for_its_model_again() -> None:
    replies = [503, 500, 200, 503, 503]

    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(replies.pop(0), json={"data": [{"id": "m"}]})

    async def asked(retries: int) -> None:
        backend = OpenAIBackend("http://server", transport=httpx.MockTransport(reply))
        try:
            assert await backend.wait_for_model(retries) == "m"
        finally:
            await backend.close()

    run_virtually(asked(2))
    with pytest.raises(Overloaded):
        run_virtually(asked(1))
    assert not replies


def test_a_server_without_tokenize_cannot_split() -> None:
    backend = replying(404, b"")
    with pytest.raises(Unsupported, match="split at a separator"):
        asyncio.run(backend.split("text", lambda ends, is_cut: []))


def tokenizing(**answers: dict[str, Any]) -> OpenAIBackend:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answers[request.url.path.removeprefix("/")])

    return OpenAIBackend("http://server/v1", "m", transport=httpx.MockTransport(reply))


def test_one_request_that_cannot_be_counted_does_not_end_counting() -> None:
    replies = [(400, {"error": {"message": "no system role"}}), (200, {"count": 7, "max_model_len": 100}), (404, {})]
    served = iter(replies)

    def reply(request: httpx.Request) -> httpx.Response:
        status, answer = next(served)
        return httpx.Response(status, json=answer)

    backend = OpenAIBackend("http://server/v1", "m", transport=httpx.MockTransport(reply))
    request = ModelRequest("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})

    async def counted() -> CallBound | None:
        return await backend.call_bound(request)

    bounds = [asyncio.run(counted()) for _ in range(4)]
    assert [bound is not None for bound in bounds] == [False, True, False, False]
    assert next(served, None) is None, "a server without /tokenize is asked no more"


@pytest.mark.parametrize(
    "strings", [["Ġa", "Ã", "©", "Ġb"], ["▁a", "<0xC3>", "<0xA9>", "▁b"], ["▁", "▁a", "<0xC3>", "<0xA9>", "▁b"]]
)
def test_a_character_of_several_tokens_is_in_one_part(strings: list[str]) -> None:
    backend = tokenizing(tokenize={"tokens": list(range(len(strings))), "token_strs": strings})
    split = FunctionNode(id="s", name="split")
    for size, parts in ((3, [" aé", " b"]), (2, [" a", "é", " b"]), (1, [" a", "é", " b"])):
        args = {"max_tokens": size}
        found = backend.split(" aé b", lambda ends, is_cut, args=args: split_ranges(args, ends, split, is_cut))
        assert asyncio.run(found) == parts


def test_a_server_that_tells_no_tokens_does_not_corrupt_a_text() -> None:
    backend = tokenizing(tokenize={"tokens": [0, 1, 2]}, detokenize={"text": "a\ufffd"})
    with pytest.raises(Unsupported, match="split at a separator"):
        asyncio.run(backend.split("aé", lambda ends, is_cut: [(0, 2), (2, 3)]))
    backend = tokenizing(tokenize={"tokens": [0, 1]}, detokenize={"text": "a"})
    assert asyncio.run(backend.split("aa", lambda ends, is_cut: [(0, 1), (1, 2)])) == ["a", "a"]


def test_results_are_a_table_with_the_errors_of_rows(llm: LLM, tmp_path: Path) -> None:
    def strict(topic: str) -> str:
        if topic == "bad":
            raise ValueError("a bad topic")
        return topic.upper()

    flow = weft.flow(lambda topic: {"loud": ops.function(strict, topic), "same": topic})
    out = tmp_path / "out.jsonl"
    results = flow.run([{"topic": "good"}, {"topic": "bad"}, {"topic": "fine"}], llm, out=out, progress=False)
    assert results.column("loud") == ["GOOD", None, "FINE"]
    assert results[0]["same"] == "good"
    (mistake,) = results.errors
    assert (mistake.row, mistake.node, mistake.message, mistake.kind) == (1, "function_1", "a bad topic", "ValueError")
    with pytest.raises(KeyError, match="row 1 failed at function_1: a bad topic"):
        results[1]["loud"]
    lines = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda line: line["row"])
    assert lines[0] == {"row": 0, "outputs": {"loud": "GOOD", "same": "good"}}
    assert lines[1] == {"row": 1, "outputs": {"same": "bad"}, "error": mistake._asdict()}


def test_json_runs_as_it_is(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "flow.json"
    path.write_text(json.dumps(everything.to_dict()))
    loaded = weft.Workflow.load(path)
    assert loaded.digest == everything.digest
    assert outputs(loaded.run(ROWS[:1], llm)) == outputs(everything.run(ROWS[:1], llm))


def test_bars_show_rows_and_nodes(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    everything.run(ROWS[:2], llm, progress=True)
    shown = capsys.readouterr().err
    assert "rows" in shown
    assert "map_1.llm_3" in shown


def test_bars_count_answers_of_the_prompt_cache(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = weft.flow(lambda q: {"out": ops.llm(f"Say {q}", max_tokens=4, temperature=0)})
    rows = [{"q": number} for number in range(3)]
    for _ in range(2):
        greedy.run(rows, llm, cache=tmp_path, progress=True)
        shown = capsys.readouterr().err
        assert next(line for line in shown.splitlines() if "llm_1" in line).count("3/3") == 1


def test_closing_a_stream_cancels_the_run(llm: LLM) -> None:
    with closing(everything.stream(ROWS, llm)) as results:
        next(results)
    assert all(result.error is None for result in everything.stream(ROWS[:1], llm))
    assert llm.stats().num_sequences == 0


@pytest.mark.parametrize(("owner", "sends"), [("weft", True), ("openai", False), (None, False)])
def test_only_a_server_of_ours_is_told_what_changes_no_answer(owner: str | None, sends: bool) -> None:
    bodies = []

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(404 if owner is None else 200, json={"data": [{"id": "m", "owned_by": owner}]})
        bodies.append(json.loads(request.content))
        return httpx.Response(200, content=EVENT + b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n')

    backend = OpenAIBackend("http://server/v1", "m", transport=httpx.MockTransport(reply))
    assert isinstance(answered(backend, SAY._replace(hints={"session_id": "s"})), ModelAnswer)
    assert ("session_id" in bodies[0]) is sends


def test_the_digest_of_a_prompt_is_that_of_its_tokens(llm: LLM) -> None:
    host = llm.workflow_host()
    backend = host.backend
    assert isinstance(backend, KnowsTokens)

    def digest(endpoint: Literal["/v1/chat/completions", "/v1/completions"], **body: Any) -> str:
        return host.thread.run(backend.prompt_digest(ModelRequest(endpoint, body)))

    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens = load_tokenizer("weft-tiny").encode(text, add_special_tokens=False)
    assert digest(CHAT, messages=[{"role": "user", "content": "hi"}], seed=1) == hashlib.sha256(tokens).hexdigest()
    assert digest(COMPLETION, prompt=text, add_special_tokens=False) == hashlib.sha256(tokens).hexdigest()
    with pytest.raises(WeftError):
        digest(CHAT, messages=[])


def test_a_chat_is_rendered_once_for_its_digest_and_its_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    host, rendered, render = llm.workflow_host(), [], chats.render
    backend = host.backend
    assert isinstance(backend, EndpointBackend)

    def note(chat: chats.ChatPrompt, tokenizer: Tokenizer) -> str:
        rendered.append(chat)
        return render(chat, tokenizer)

    monkeypatch.setattr(chats, "render", note)
    request = SAY._replace(body=SAY.body | {"temperature": 0, "max_tokens": 5})

    def said(asked: ModelRequest) -> str:
        return host.thread.run(backend.complete(asked, Unheard())).text

    alone = said(request)
    host.thread.run(backend.prompt_digest(request))
    assert said(request._replace(hints={"priority": 1})) == alone
    assert len(rendered) == 2
    for number in range(2 * MAX_ENCODED):  # their answers are in a prompt cache
        host.thread.run(backend.prompt_digest(SAY._replace(body=SAY.body | {"seed": number})))
    assert len(backend._encoded) == MAX_ENCODED
    assert said(request) == alone
