"""The whole way: HTTP, programs, a real engine and the model that ships in the package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.server.conftest import RunningServer, running, sse
from tests.server.test_disconnect import connect, read_until
from weft.config import EngineConfig
from weft.core.wire import EngineStats, ResetPrefixCache
from weft.engine.inline import InlineEngine
from weft.tokenizers.load import load_tokenizer

PROMPT = "Once upon a time a weaver went to the sea and found a shell. " * 4


@pytest.fixture(scope="module")
def real() -> Iterator[RunningServer]:
    # float32: in bfloat16, what is computed and what is found in the cache may differ by a rounding.
    config = EngineConfig(num_pages=2048, threads=1, dtype="float32")
    engine = InlineEngine.from_config(config, trace=True)
    with running(engine=engine, tokenizer=load_tokenizer("weft-tiny"), names=["weft-tiny"], trace=True) as server:
        server.wait_until(lambda: server.service.ready)
        yield server
        server.wait_until(lambda: not server.runtime.num_sequences)
        stats = stats_of(server)
        while stats.num_sequences:
            stats = stats_of(server)
        assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total


def stats_of(server: RunningServer) -> EngineStats:
    return asyncio.run_coroutine_threadsafe(server.engine.stats(), server.server.loop).result(30)


def complete(server: RunningServer, **fields) -> dict:
    response = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_greedy_and_seeded_answers_repeat(real: RunningServer) -> None:
    first, second = (complete(real, temperature=0, cache_salt=salt) for salt in ("a", "b"))
    assert first["choices"] == second["choices"]
    drawn, again = (complete(real, seed=3, n=3) for _ in range(2))
    assert [choice["text"] for choice in drawn["choices"]] == [choice["text"] for choice in again["choices"]]


def test_cached_tokens_are_told_and_kept_apart_by_salt(real: RunningServer) -> None:
    def cached(salt: str) -> tuple[int, int]:
        usage = complete(real, temperature=0, cache_salt=salt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    assert cached("one")[0] == 0
    hit, prompt = cached("one")
    assert 0 < hit < prompt
    assert cached("two")[0] == 0


def test_a_stream_is_the_whole_in_parts(real: RunningServer) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 20, "n": 2, "seed": 9, "logprobs": 2}
    whole = complete(real, **fields)["choices"]
    texts, tokens = ["", ""], [[], []]
    for event in sse(real.post("/v1/completions", fields | {"stream": True}).text)[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == [choice["text"] for choice in whole]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole]


def test_chat_embedding_and_the_prompt_alone(real: RunningServer) -> None:
    answer = real.chat(max_tokens=5, logprobs=True, top_logprobs=3).json()
    assert 1 <= answer["usage"]["completion_tokens"] <= 5
    assert all(len(entry["top_logprobs"]) == 3 for entry in answer["choices"][0]["logprobs"]["content"])
    vectors = real.post("/v1/embeddings", {"input": ["the sea", "the sea", "a loom"]}).json()["data"]
    assert vectors[0]["embedding"] == pytest.approx(vectors[1]["embedding"], abs=1e-5)
    assert sum(x * x for x in vectors[2]["embedding"]) == pytest.approx(1, abs=1e-5)
    alone = complete(real, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert alone["text"] == PROMPT
    assert len(alone["logprobs"]["tokens"]) == len(alone["logprobs"]["text_offset"])


def test_a_client_that_leaves_stops_the_work(real: RunningServer) -> None:
    before = stats_of(real).generated_tokens
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    connection = connect(real, "/v1/completions", body)
    read_until(connection, b"data: ")
    connection.close()
    real.wait_until(lambda: not real.runtime.num_sequences)
    while stats_of(real).num_sequences:
        pass
    assert stats_of(real).generated_tokens - before < 1500


def test_context_of_the_model(real: RunningServer) -> None:
    context = real.http().get("/v1/models/weft-tiny").json()["max_model_len"]
    long = real.post("/v1/completions", {"prompt": PROMPT * 100})
    assert long.status_code == 400
    assert str(context) in long.json()["error"]["message"]
    fits = complete(real, prompt=PROMPT * 100, truncate_prompt_tokens=-1, max_tokens=1)
    assert fits["usage"]["prompt_tokens"] == context - 1


def test_traces_have_both_sides(real: RunningServer) -> None:
    real.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers={"x-request-id": "traced"})
    spans = real.http().get("/v1/traces/traced").json()["spans"]
    assert {span["source"] for span in spans} == {"front", "engine"}


def chat(server: RunningServer, **fields) -> dict:
    response = server.chat(**{"temperature": 0, "max_tokens": 200} | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_required_call_fits_the_schema_of_its_tool(real: RunningServer) -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    parameters = cities | {"additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for fields in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}):
        choice = chat(real, tools=tools, parallel_tool_calls=False, **fields)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


JSON_IN_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value){0,2})? "}" ws
array  ::= "[" ws (value ("," ws value){0,2})? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})){0,9} "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,5})) ("." [0-9]{1,4})? ([eE] [-+]? [0-9]{1,2})? ws
ws     ::= | " " | "\n" [ \t]{0,4}
"""


def test_a_grammar_in_gbnf(real: RunningServer) -> None:
    """JSON, with Python's parser as the judge; sums, with its evaluation."""
    answer = complete(real, prompt="{", guided_grammar=JSON_IN_GBNF, temperature=1.5, seed=4, n=16, max_tokens=400)
    whole = [choice["text"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert len(whole) > 8
    assert all(isinstance(json.loads(text), dict) for text in whole)
    sums = 'root ::= "=" sum\nsum ::= term ([-+*] term){1,3}\nterm ::= [1-9] [0-9]{0,2} | "(" term "-" [0-9] ")"'
    for choice in complete(real, guided_grammar=sums, temperature=1.5, seed=4, n=16, max_tokens=400)["choices"]:
        if choice["finish_reason"] == "stop":
            assert choice["text"].startswith("=")
            assert isinstance(eval(choice["text"][1:], {}), int)


def test_answers_have_the_form_that_was_asked_for(real: RunningServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(chat(real, response_format=form)["message"]["content"])["n"] in (1, 2)
    assert chat(real, guided_choice=["yes", "no"])["message"]["content"] in ("yes", "no")
    assert complete(real, guided_regex="[ab]{3}", temperature=1)["choices"][0]["text"].strip("ab") == ""
    wrong = real.chat(guided_regex="(").json()["error"]
    assert (wrong["param"], wrong["type"]) == ("guided_regex", "invalid_request_error")


def counts(usage: object) -> tuple[int, int, int]:
    """(cached, recomputed, new) prompt tokens of a usage of OpenAI's client."""
    details = usage.prompt_tokens_details.model_dump()  # type: ignore[attr-defined]
    assert 0 <= details["host_tokens"] <= details["cached_tokens"]
    found = details["cached_tokens"], details["recomputed_tokens"], details["new_tokens"]
    assert sum(found) == usage.prompt_tokens  # type: ignore[attr-defined]
    return found


def test_openais_client_is_told_where_the_prompt_s_kv_came_from(real: RunningServer) -> None:
    completions = real.openai().completions
    fields = {"model": "weft-tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "n": 2}
    salted = {"extra_body": {"cache_salt": "usage"}}
    cached, recomputed, new = counts(completions.create(**fields, **salted).usage)
    assert (cached, recomputed) == (0, 0)
    options = {"include_usage": True}
    *_, last = completions.create(**fields, **salted, stream=True, stream_options=options)
    assert counts(last.usage) == (new - 1, 0, 1), "the last token is computed for what follows it"
    real.on_loop(lambda: real.engine.send([ResetPrefixCache()]))
    assert counts(completions.create(**fields, **salted).usage) == (0, new, 0)
    several = fields | {"prompt": [PROMPT, "A new one.", PROMPT]}
    answer = completions.create(**several, **salted)
    cached, recomputed, new = counts(answer.usage)
    assert cached > 0
    assert 0 < new < 20
    assert answer.usage.prompt_tokens_details.first_different_token is None
    scored = {"extra_body": {"cache_salt": "usage", "prompt_logprobs": 1}}
    assert counts(completions.create(**fields, **scored).usage)[0] == 0, "all of it was computed for its scores"


def test_openais_client_is_told_where_a_turn_differs_from_the_one_before(real: RunningServer) -> None:
    chats = real.openai().chat.completions
    messages = [{"role": "user", "content": PROMPT}]
    salted = {"model": "weft-tiny", "temperature": 0, "extra_body": {"cache_salt": "turns", "ignore_eos": True}}

    def ask() -> tuple[str, int, int, object]:
        answer = chats.create(messages=messages, max_tokens=24, **salted)
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].message.content, answer.usage.prompt_tokens, details.cached_tokens, details

    text, num_prompt, _, details = ask()
    assert details.first_different_token is None
    messages += [{"role": "assistant", "content": "?" + text[1:]}, {"role": "user", "content": "And then?"}]
    _, _, cached, details = ask()
    assert details.first_different_token == cached == num_prompt
