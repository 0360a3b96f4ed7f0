"""`/v1/completions` beyond what the official client checks; `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.conftest import RunningServer, ids, sse
from tests.server.test_requests import error_of
from weft.endpoints import embeddings

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "choices"), [("ab", 1), (["ab", "c"], 2), (ids("ab"), 1), ([ids("ab"), ids("c"), ids("d")], 3)]
)
def test_forms_of_prompts(server: RunningServer, prompt: object, choices: int) -> None:
    body = server.post(PATH, {"prompt": prompt, "max_tokens": 2, "return_token_ids": True}).json()
    assert len(body["choices"]) == choices
    assert [choice["index"] for choice in body["choices"]] == list(range(choices))
    assert body["choices"][0]["prompt_token_ids"] == ids("ab")
    assert body["usage"]["prompt_tokens"] == len(ids("ab")) + choices - 1
    assert len(body["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [[], [97]],
        [97, "a"],
        ["a", 97],
        ["a", [97]],
        [[97], "a"],
        [[97, "a"]],
        [264],
        [-1],
        [2**40],
        [1.5],
        [True],
        5,
        {"text": "a"},
        ["a"] * 129,
    ],
)
def test_prompts_of_wrong_type(server: RunningServer, prompt: object) -> None:
    assert (error_of(server.post(PATH, {"prompt": prompt}))["param"] or "").startswith("prompt")


def test_prompts_times_choices_are_bounded(server: RunningServer) -> None:
    body = {"prompt": ["a"] * 64, "n": 2, "max_tokens": 1}
    assert len(server.post(PATH, body).json()["choices"]) == 128
    assert error_of(server.post(PATH, body | {"n": 3}))["param"] == "prompt"


def test_only_the_prompt(server: RunningServer) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 2, "n": 2}
    answer = server.post(PATH, body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "abc"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0
    assert error_of(server.post(PATH, {"prompt": "abc", "max_tokens": 0}))["param"] == "max_tokens"


def test_prompt_logprobs(server: RunningServer) -> None:
    answer = server.post(PATH, {"prompt": ["abc", "d"], "max_tokens": 1, "prompt_logprobs": 2}).json()
    first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert first[0] is None
    assert first[1]["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert set(first[1]) == {"98", "99"}
    assert second == [None]


def test_echo_in_a_stream_equals_the_whole(server: RunningServer) -> None:
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1}
    whole = server.post(PATH, body).json()["choices"]
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    events = sse(server.post(PATH, body | {"stream": True}).text)
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [choice["text"] for choice in whole]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in whole]


def test_token_ids_in_a_stream(server: RunningServer) -> None:
    body = {"prompt": "ab", "max_tokens": 5, "return_token_ids": True, "stream": True}
    choices = [json.loads(event)["choices"][0] for event in sse(server.post(PATH, body).text)[:-1]]
    assert choices[0]["prompt_token_ids"] == ids("ab")
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert len([token for choice in choices for token in choice["token_ids"]]) == 5


def test_split_characters_in_logprobs(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script([*"é".encode(), ord("x")]))
    choice = server.post(PATH, {"prompt": "a", "max_tokens": 3, "logprobs": 0}).json()["choices"][0]
    assert choice["text"] == "éx"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_special_tokens_in_the_text(server: RunningServer) -> None:
    def text(skip: bool) -> str:
        server.on_loop(lambda: server.engine.script([97, 257, 98]))
        body = {"prompt": "a", "max_tokens": 3, "skip_special_tokens": skip}
        return server.post(PATH, body).json()["choices"][0]["text"]

    assert text(True) == "ab"
    assert text(False) == "a<|im_start|>b"


def test_tokenize_and_back(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == ids("hé")
    assert (answer["count"], answer["max_model_len"]) == (3, 4096)
    assert len(answer["token_strs"]) == 3
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    special = {"tokens": [257, 97]}
    assert server.post("/detokenize", special).json() == {"prompt": "<|im_start|>a"}
    assert server.post("/detokenize", special | {"skip_special_tokens": True}).json() == {"prompt": "a"}
    assert error_of(server.post("/detokenize", {"tokens": [9999]}))["param"] == "tokens"
    assert error_of(server.post("/tokenize", {}))["param"] == "prompt"
    assert error_of(server.post("/tokenize", {"prompt": "a", "messages": []}))["param"] in ("prompt", "messages")
    assert error_of(server.post("/tokenize", {"prompt": "a", "tools": [{}]}))["param"] == "tools"


def test_tokenize_is_what_chat_sends(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    answer = server.chat(messages=messages, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == tokens
    assert len(answer["choices"][0]["token_ids"]) == 4


def test_embedding_inputs(server: RunningServer) -> None:
    def post(value: object, **fields):
        return server.post("/v1/embeddings", {"input": value} | fields)

    assert len(post(["a"] * 200).json()["data"]) == 200
    for wrong in ("", [], [[]], [97, "a"], ["a"] * 2049, 5, [9999]):
        assert (error_of(post(wrong))["param"] or "").startswith("input")
    assert error_of(post("a", dimensions=9))["param"] == "dimensions"
    assert error_of(post("a", dimensions=0))["param"] == "dimensions"
    assert error_of(post("a", encoding_format="hex"))["param"] == "encoding_format"
    assert error_of(post("a" * 5000))["code"] == "context_length_exceeded"
    choices = {"prompt": "a", "guided_choice": [""] * 70_000}
    assert error_of(server.post("/v1/completions", choices))["param"] == "guided_choice"
    assert post("a" * 5000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 4096


def test_many_vectors_are_written_on_a_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    written = embeddings._written

    def noted(vector: list[float], form: Any) -> Any:
        threads.append(threading.current_thread().name)
        return written(vector, form)

    monkeypatch.setattr(embeddings, "_written", noted)
    monkeypatch.setattr(embeddings, "NUMBERS_PER_DETAIL", 1)
    for count in (1, 2000):
        threads.clear()
        assert len(server.post("/v1/embeddings", {"input": ["a"] * count}).json()["data"]) == count
        assert (set(threads) == {server._thread.name}) == (count == 1)
