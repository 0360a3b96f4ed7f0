"""Sampling defaults of a checkpoint, from its file to the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import running
from weft.abi.errors import InvalidRequest, ModelLoadError
from weft.core.sampling import SamplingParams
from weft.core.wire import Generate
from weft.endpoints.fields import request_from
from weft.endpoints.schemas.chat import ChatRequest
from weft.hub import find_model
from weft.llm.options import arguments
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.tokenizers.generation_config import sampling_defaults
from weft.tokenizers.load import load_directory

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
DEFAULTS = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_new_tokens": 5, "do_sample": True}, {}),
        ({"do_sample": True, **DEFAULTS, "top_p": None}, DEFAULTS),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, **DEFAULTS}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_what_the_file_says(raw: dict[str, Any], expected: dict[str, float]) -> None:
    assert sampling_defaults(raw, "generation_config.json") == expected


@pytest.mark.parametrize(
    "raw", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": -1}, {"top_k": 1.5}, {"min_p": True}]
)
def test_a_value_that_cannot_be_is_named(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=rf"some/file: {next(iter(raw))} .*--generation-config none"):
        sampling_defaults(raw, "some/file")


def test_they_are_loaded_where_they_are_wanted(tmp_path: Path) -> None:
    embedded = find_model("weft-tiny", None, files=[], offline=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / file, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **DEFAULTS}))
    assert load_directory(tmp_path, generation_config=True).sampling_defaults == DEFAULTS
    assert load_directory(tmp_path).sampling_defaults == {}
    assert load_directory(embedded, generation_config=True).sampling_defaults == {"temperature": 0.0}


def test_a_request_takes_what_it_leaves_out() -> None:
    def read(**fields: Any) -> ChatRequest:
        return request_from(ChatRequest, {**CHAT, **fields}, lambda model: DEFAULTS if model == "m" else {})

    asked = read(model="m", temperature=1.5, top_k=None)
    assert (asked.temperature, asked.top_k, asked.repetition_penalty, asked.top_p) == (1.5, 20, 1.1, 1.0)
    assert (read(model="other").temperature, read().top_k) == (1.0, 0)
    searched = read(model="m", use_beam_search=True)
    assert (searched.temperature, searched.top_k, searched.repetition_penalty) == (1.0, 0, 1.0)
    with pytest.raises(InvalidRequest, match="tempratur"):
        read(model="m", tempratur=1)


def test_the_offline_api_takes_what_is_left_out() -> None:
    given = arguments(None, None, {"top_k": 3}, DEFAULTS)[0].sampling
    assert (given.temperature, given.top_k, given.repetition_penalty) == (0.6, 3, 1.1)
    explicit = arguments(SamplingParams(top_p=0.5), None, {}, DEFAULTS)[0].sampling
    assert explicit == SamplingParams(top_p=0.5)


def test_requests_over_http_take_what_they_leave_out() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.sampling_defaults = dict(DEFAULTS)
    with running(tokenizer=tokenizer) as server:
        assert server.chat().status_code == 200
        assert server.chat(temperature=1.5, top_k=0).status_code == 200
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        sent = server.on_loop(lambda: [c.sampling for c in server.engine.sent if isinstance(c, Generate)])
    found = [(sampling.temperature, sampling.top_k, sampling.repetition_penalty) for sampling in sent]
    assert found == [(0.6, 20, 1.1), (1.5, 0, 1.1), (0.6, 20, 1.1)]
