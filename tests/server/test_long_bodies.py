"""Long requests do not hold up short ones. Shown by the order of events, not by time."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_programs import ECHO
from weft.endpoints.models import ActiveModel
from weft.endpoints.prompts import Fit, tokenize
from weft.server import limits
from weft.server.routes import runs
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer

CONTEXT = 200_000
LONG = 140_000


@pytest.fixture
def roomy():
    with running(engine=FakeEngine(msgspec.structs.replace(DEFAULT_INFO, max_context=CONTEXT))) as server:
        yield server


class Gate:
    """Blocks the first caller until it is opened, and records the caller's thread."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.thread = ""

    def __call__(self) -> None:
        if not self.reached.is_set():
            self.thread = threading.current_thread().name
            self.reached.set()
            assert self.opened.wait(60)


def short_requests_pass(server: RunningServer, gate: Gate, path: str, body: dict) -> dict:
    """Send a long request, have short ones answered while it stands at the gate, then let it go on."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post(path, body)))
    thread.start()
    assert gate.reached.wait(60)
    turns = server.on_loop(lambda: server.engine.steps)
    for _ in range(3):
        assert server.chat().status_code == 200
    assert server.on_loop(lambda: server.engine.steps) > turns
    assert not answers
    gate.opened.set()
    thread.join(60)
    assert answers[0].status_code == 200, answers[0].text
    assert gate.thread != server._thread.name
    return answers[0].json()


def test_decoding_a_long_body(roomy: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, decode = Gate(), limits.decode

    def gated(body: bytes) -> object:
        if len(body) > limits.INLINE_DECODE_BYTES:
            gate()
        return decode(body)

    monkeypatch.setattr(limits, "decode", gated)
    body = {"prompt": [97] * LONG, "max_tokens": 1}
    answer = short_requests_pass(roomy, gate, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == LONG


@pytest.mark.parametrize("chat", [False, True])
def test_tokenizing_a_long_text(roomy: RunningServer, monkeypatch: pytest.MonkeyPatch, chat: bool) -> None:
    gate, encode = Gate(), Tokenizer._encode_whole

    def gated(self: Tokenizer, text: str, add_special_tokens: bool) -> bytes:
        if len(text) >= LONG:
            gate()
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode_whole", gated)
    text = "x" * LONG
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    answer = short_requests_pass(roomy, gate, path, body | {"max_tokens": 1})
    assert LONG <= answer["usage"]["prompt_tokens"] < LONG + 100


def test_a_long_body_is_read_in_many_turns(roomy: RunningServer) -> None:
    """The loop turns while 140,000 ids arrive, are decoded, checked and packed."""
    turns = 0

    def tick() -> None:
        nonlocal turns
        turns += 1
        if not done.is_set():
            roomy.server.loop.call_soon(tick)

    done = threading.Event()
    roomy.on_loop(tick)
    before = turns
    answer = roomy.post("/v1/completions", {"prompt": [97] * LONG, "max_tokens": 1, "return_token_ids": True})
    during = turns - before
    done.set()
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["prompt_token_ids"]) == LONG
    assert during > 10


@pytest.mark.parametrize("entry", ["x" * 300, "x", [97] * 300])
def test_a_list_of_short_prompts_is_tokenized_in_many_turns(entry: str | list[int]) -> None:
    model = SimpleNamespace(
        engine=SimpleNamespace(info=DEFAULT_INFO), max_context=CONTEXT, longest_prompt=CONTEXT, max_text_chars=CONTEXT
    )
    fit = Fit(cast(ActiveModel, model), max_tokens=0, keep_last=None, param="input")
    entries = [entry] * 2048

    async def run() -> int:
        task = asyncio.create_task(tokenize(entries, byte_tokenizer(), fit, add_special=False, tenant=""))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(task.result()) == len(entries)
        return turns

    assert asyncio.run(run()) > sum(64 + len(entry) for entry in entries) / INLINE_CHARS


def test_what_cannot_fit_is_refused_before_work_is_done(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> bytes:
        raise AssertionError("was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", never)
    for prompt in ("x" * 2_000_000, [97] * 1_000_000):
        body = json.dumps({"prompt": prompt})
        answer = server.http().post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_values_of_a_long_body_for_a_run_are_encoded_on_another_thread(
    roomy: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, threads = runs._encode, dict[int, str]()

    def watched(value: object) -> bytes:
        data = encode(value)
        threads[len(data)] = threading.current_thread().name
        return data

    monkeypatch.setattr(runs, "_encode", watched)
    text = "x" * (limits.INLINE_DECODE_BYTES + 1)
    started = roomy.post("/v1/runs", {"source": ECHO, "args": text, "background": True})
    assert started.status_code == 202, started.text
    run = started.json()["id"]
    assert roomy.post(f"/v1/runs/{run}/messages", {"message": text + text}).status_code == 200
    roomy.wait_until(lambda: not list(roomy.service.programs.history.active()))
    assert roomy.http().get(f"/v1/runs/{run}").json()["result"] == {"args": text, "message": text + text}
    assert [len(text) + 2, 2 * len(text) + 2] == list(threads)
    assert roomy._thread.name not in threads.values()
