"""Beam searches over HTTP: against transformers' beams, with the official client, and what becomes of odd requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.server.conftest import MODEL, RunningServer, ids, running, sse
from tests.server.test_disconnect import connect
from tests.server.test_real_engine import stats_of
from tests.server.test_requests import error_of
from tests.server.test_tools import TOOLS
from weft.config import EngineConfig
from weft.engine.inline import InlineEngine
from weft.models.random_checkpoints import IM_END_ID, write_tiny
from weft.sdk.beam_rules import MAX_WIDTH
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.tokenizers.load import load_tokenizer

PROMPT = "Once upon a time, "
PATHS = ("/v1/chat/completions", "/v1/completions")
both = pytest.mark.parametrize("path", PATHS)
ENDS = [72, 91, 209]
"""Tokens that likely beams of this checkpoint have."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("beams")
    write_tiny(directory, "llama", seed=5, dtype=torch.float64, tokenizer=True)
    return directory


@pytest.fixture(scope="module")
def judge(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)


@pytest.fixture(scope="module")
def real(directory: Path) -> Iterator[RunningServer]:
    engine = InlineEngine.from_config(
        EngineConfig(model=str(directory), num_pages=512, threads=1, dtype="float64", page_size=16, max_context=128)
    )
    with running(engine=engine, tokenizer=load_tokenizer(str(directory))) as server:
        server.wait_until(lambda: server.service.ready)
        yield server
        server.wait_until(lambda: not server.runtime.num_sequences)
        assert server.runtime.num_operations == 0
        stats = stats_of(server)
        while stats.num_sequences:
            stats = stats_of(server)
        assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total


def complete(server: RunningServer, **fields) -> dict:
    body = {"prompt": PROMPT, "use_beam_search": True, "return_token_ids": True, "max_tokens": 9} | fields
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def trimmed(row: list[int], ends: list[int]) -> list[int]:
    """Without what transformers pads with."""
    return next((row[: at + 1] for at, token in enumerate(row) if token in ends), row)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": 2, "temperature": 0},
        {"n": 4, "length_penalty": 0},
        {"n": 5, "length_penalty": 2.5, "stop_token_ids": ENDS},
        {"n": 3, "length_penalty": -1.5, "stop_token_ids": ENDS},
        {"n": 4, "early_stopping": True, "stop_token_ids": ENDS},
        {"n": 2, "best_of": 6, "early_stopping": "never", "stop_token_ids": ENDS},
        {"n": 3, "early_stopping": "never", "stop_token_ids": ENDS, "max_tokens": 40},
        {"n": 3, "early_stopping": False, "stop_token_ids": ENDS, "max_tokens": 40},
        {"n": 3, "min_tokens": 6, "stop_token_ids": ENDS},
        {"n": 3, "ignore_eos": True},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_the_beams_are_those_of_transformers(real: RunningServer, judge: LlamaForCausalLM, fields: dict) -> None:
    answer = complete(real, **fields)
    ends = fields.get("stop_token_ids", []) + ([] if fields.get("ignore_eos") else [IM_END_ID])
    width, n = fields.get("best_of", fields["n"]), fields["n"]
    found = judge.generate(
        torch.tensor([answer["choices"][0]["prompt_token_ids"]]),
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=fields.get("max_tokens", 9),
        min_new_tokens=fields.get("min_tokens"),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=ends or None,
        length_penalty=float(fields.get("length_penalty", 1)),
        early_stopping=fields.get("early_stopping", False),
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt_tokens = answer["usage"]["prompt_tokens"]
    expected = [trimmed(row, ends) for row in found.sequences[:, prompt_tokens:].tolist()]
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == expected
    if width > 1:
        scores = [choice["score"] for choice in choices]
        assert scores == pytest.approx(found.sequences_scores.tolist(), rel=1e-6, abs=1e-5)
        assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))
    for choice in choices:
        stopped = choice["token_ids"][-1] in ends
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        assert choice["stop_reason"] == (choice["token_ids"][-1] if stopped else None)
    if "stop_token_ids" in fields:
        assert any(choice["finish_reason"] == "stop" for choice in choices)


def test_never_looks_further_ahead(real: RunningServer) -> None:
    fields = {"n": 3, "stop_token_ids": ENDS, "max_tokens": 40}
    never, usual, early = (
        [choice["finish_reason"] for choice in complete(real, **fields, early_stopping=when)["choices"]]
        for when in ("never", False, True)
    )
    assert never == ["stop", "length", "length"]
    assert usual == early == ["stop"] * 3


def test_log_probabilities_of_beams(real: RunningServer, judge: LlamaForCausalLM) -> None:
    answer = complete(real, n=3, logprobs=4)
    assert answer["choices"] == complete(real, n=3, logprobs=4)["choices"]
    for choice in answer["choices"]:
        prompt = choice["prompt_token_ids"]
        with torch.no_grad():
            logits = judge(torch.tensor([prompt + choice["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1)
        chosen = own[range(len(own)), choice["token_ids"]].tolist()
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-5)
        assert choice["cumulative_logprob"] == pytest.approx(sum(chosen), abs=1e-5)
        for told, row in zip(choice["logprobs"]["top_logprobs"], own, strict=True):
            # The chosen one is told too, where it is not among the four.
            assert sorted(told.values(), reverse=True)[:4] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)


def test_cached_tokens_are_exact(real: RunningServer) -> None:
    prompt = list(range(60, 110))
    first, second = (complete(real, prompt=prompt, n=3, cache_salt="beams")["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 48
    assert second["prompt_tokens"] == 50


def test_with_the_official_client(real: RunningServer) -> None:
    client = real.openai()
    search = {"use_beam_search": True, "length_penalty": 0.5}
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": MODEL, "messages": messages, "n": 3, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields, extra_body=search)
    assert len({choice.message.content for choice in whole.choices}) == 3
    scores = [choice.model_extra["score"] for choice in whole.choices]
    assert scores == sorted(scores, reverse=True)
    for choice in whole.choices:
        told = choice.logprobs.content
        assert sum(entry.logprob for entry in told) == pytest.approx(choice.model_extra["cumulative_logprob"], abs=1e-4)
        assert [len(entry.top_logprobs) for entry in told] == [2] * len(told)
    assert whole.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in whole.choices)
    texts = ["", "", ""]
    ends = []
    stream = client.chat.completions.create(
        **fields, extra_body=search, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append((choice.index, choice.model_extra["score"]))
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == list(enumerate(scores))
    assert chunk.usage == whole.usage.model_copy(update={"prompt_tokens_details": chunk.usage.prompt_tokens_details})


def test_several_prompts_and_their_streams(real: RunningServer) -> None:
    fields = {"prompt": ["one ", "two ", "three "], "n": 2, "best_of": 3, "echo": True}
    choices = complete(real, **fields)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert choices[2:4] == [
        choice | {"index": choice["index"] + 2} for choice in complete(real, **fields | {"prompt": "two "})["choices"]
    ]
    assert all(choice["text"].startswith("two ") for choice in choices[2:4])
    body = fields | {"use_beam_search": True, "max_tokens": 9, "stream": True}
    events = [json.loads(event) for event in sse(real.post("/v1/completions", body).text)[:-1]]
    told = [event["choices"][0] for event in events]
    assert {one["index"]: one["text"] for one in told} == {one["index"]: one["text"] for one in choices}
    assert len(told) == 6


def test_the_token_that_ends_a_beam_is_text_only_where_asked_for(real: RunningServer) -> None:
    fields = {"n": 4, "stop_token_ids": ENDS, "skip_special_tokens": False}
    cut, kept = (complete(real, **fields, include_stop_str_in_output=keep)["choices"] for keep in (False, True))
    assert [choice["token_ids"] for choice in cut] == [choice["token_ids"] for choice in kept]
    assert any(choice["finish_reason"] == "stop" for choice in kept)
    decode = real.service.models[0].tokenizer.decode
    for before, after in zip(cut, kept, strict=True):
        tokens = after["token_ids"]
        assert after["text"] == decode(tokens, skip_special=False)
        assert before["text"] == decode(tokens[:-1] if after["finish_reason"] == "stop" else tokens, skip_special=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_a_real_search(real: RunningServer, stream: bool) -> None:
    """What it leaves is looked at when the server ends."""
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 8, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    connection = connect(real, "/v1/completions", body)
    real.wait_until(lambda: real.runtime.num_sequences == 8)
    connection.close()
    real.wait_until(lambda: not real.runtime.num_sequences and not real.service.num_active)


def ask(server: RunningServer, path: str, **fields) -> httpx.Response:
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "ab"}
    return server.post(path, given | {"max_tokens": 4, "use_beam_search": True} | fields)


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 40}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"97": 1}}, "logit_bias"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"stop": "x"}, "stop"),
        ({"stop": ["x"]}, "stop"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
    ],
)
def test_what_has_no_part_in_a_search_is_named(server: RunningServer, path: str, fields: dict, param: str) -> None:
    error = error_of(ask(server, path, **fields))
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert error["message"].startswith(f"{param} cannot be combined with use_beam_search")
    two = error_of(ask(server, path, **{"top_p": 0.5, "min_p": 0.5}))
    assert two["message"].startswith("top_p and min_p cannot")


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": MAX_WIDTH + 1}, "n"),
        ({"n": 2, "best_of": MAX_WIDTH + 1}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": -11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"n": 64, "stop_token_ids": [1, 2, 3, 4]}, "n"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"use_beam_search": False, "early_stopping": "never"}, "early_stopping"),
        ({"use_beam_search": False, "best_of": 2}, "best_of"),
    ],
)
def test_what_cannot_be_searched_is_named(server: RunningServer, path: str, fields: dict, param: str) -> None:
    error = error_of(ask(server, path, **fields))
    assert error["param"] == param
    assert param in error["message"]


def test_what_only_one_endpoint_refuses(server: RunningServer) -> None:
    chat, completions = PATHS
    assert error_of(ask(server, completions, echo=True, logprobs=1))["param"] == "echo"
    assert error_of(ask(server, completions, max_tokens=0, echo=True))["param"] == "max_tokens"
    assert error_of(ask(server, completions, prompt=["a"] * 43, n=2, best_of=3))["param"] == "prompt"
    assert ask(server, completions, prompt=["a"] * 42, n=2, best_of=3).status_code == 200
    template = load_tokenizer("weft-tiny").chat_template().source
    with running(tokenizer=byte_tokenizer(template)) as calling:
        error = error_of(ask(calling, chat, tools=TOOLS, tool_choice="required"))
        assert error["param"] == "tool_choice"
        assert ask(calling, chat, tools=TOOLS).status_code == 200


@both
def test_fields_that_ask_for_nothing_go_with_a_search(server: RunningServer, path: str) -> None:
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "seed": 5, "stop": [], "early_stopping": False}
    response = ask(server, path, **neutral, response_format={"type": "text"}, priority=3, user="me")
    assert response.status_code == 200, response.text


def test_what_metrics_say_of_a_search() -> None:
    with running() as server:
        assert ask(server, PATHS[1], n=3, max_tokens=7).status_code == 200
        metrics = server.on_loop(lambda: server.service.metrics.models[MODEL])
        assert metrics.request_generation_tokens.total == 21
        assert metrics.finished.get("length") == 3
        assert (metrics.time_to_first_token.count, metrics.inter_token.count) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@both
def test_a_client_that_leaves_frees_every_beam(stepped: RunningServer, path: str, steps: int, stream: bool) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": ["ab", "cd"]}
    body = given | {"use_beam_search": True, "n": 5, "max_tokens": 100, "stream": stream}
    connection = connect(stepped, path, body)
    num_roots = 1 if "chat" in path else 2
    stepped.wait_until(lambda: len(stepped.engine.sequences) == num_roots)
    for _ in range(steps):
        stepped.on_loop(stepped.engine.step)
        stepped.wait_until(lambda: len(stepped.engine.sequences) == 5 * num_roots and not stepped.engine.idle)
    connection.close()
    stepped.assert_nothing_left()
    assert stepped.engine.steps == steps
    assert stepped.service.metrics.models[MODEL].finished.get("abort") == 5 * num_roots


def test_an_engine_that_fails_in_the_middle(stepped: RunningServer) -> None:
    connection = connect(stepped, "/v1/completions", {"prompt": ids("ab"), "use_beam_search": True, "n": 3})
    stepped.wait_until(lambda: bool(stepped.engine.sequences))
    stepped.on_loop(stepped.engine.step)
    stepped.wait_until(lambda: len(stepped.engine.sequences) == 3 and not stepped.engine.idle)
    stepped.on_loop(lambda: stepped.engine.fail_next("out_of_pages"))
    stepped.on_loop(stepped.engine.step)
    assert b"503" in connection.recv(65536)
    stepped.assert_nothing_left()
