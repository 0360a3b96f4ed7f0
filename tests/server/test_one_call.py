"""`parallel_tool_calls` false: generation ends with the first call, in every form, and usage says so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.server.conftest import RunningServer, ids, running, sse
from tests.server.test_disconnect import connect, read_to_end
from tests.server.test_tools import MESSAGES, NOW, THINKS, TOOLS, WEATHER, called, create, streamed
from weft.core.wire import Cancel, Generate, Release
from weft.testing.byte_tokenizer import CHATML, byte_tokenizer

ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = '{"name": "weather", "%s": ' + ARGUMENTS + "}"
FORMS = {
    "hermes": (WEATHER, f"\n{NOW}"),
    "hermes, on lines": (f"Let me see.\n<tool_call>\n{CALL % 'arguments'}\n</tool_call>", f"\n{WEATHER}"),
    "llama3_json": (CALL % "parameters", "; " + CALL % "parameters"),
    "mistral": ("[TOOL_CALLS] [" + CALL % "arguments", ", " + CALL % "arguments" + "]"),
    "mistral, named": (f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "[TOOL_CALLS]now[ARGS]{}"),
}
"""The answer up to the end of its first call, and what the model goes on with."""
ONE = {"parallel_tool_calls": False, "logprobs": True, "extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module", params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(form: str) -> Iterator[RunningServer]:
    with running(tool_call_parser=form.partition(",")[0]) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    yield shared
    shared.assert_nothing_left()


def generated(server: RunningServer) -> int:
    return server.on_loop(lambda: server.engine._generated)


def test_generation_ends_with_the_first_call(server: RunningServer, form: str) -> None:
    first, rest = FORMS[form]
    before = generated(server)
    answer = create(server, first + rest + "x" * 500, **ONE)
    (choice,) = answer.choices
    assert called(choice.message) == [("weather", ARGUMENTS)]
    assert choice.message.content == ("Let me see.\n" if "lines" in form else None)
    assert choice.finish_reason == "tool_calls"
    assert choice.model_extra["token_ids"] == ids(first)
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == len(first)
    assert len(first) <= generated(server) - before < len(first) + 100
    chunks = list(create(server, first + rest + "x" * 500, stream=True, stream_options={"include_usage": True}, **ONE))
    (stream,) = streamed(chunks)
    assert stream.calls == [("weather", ARGUMENTS)]
    assert (stream.content or None, stream.finish_reason) == (choice.message.content, "tool_calls")
    assert chunks[-1].usage == answer.usage
    told = [token for chunk in chunks for part in chunk.choices for token in part.model_extra.get("token_ids") or ()]
    assert told == ids(first)


def test_with_several_calls_allowed_nothing_is_cut(server: RunningServer, form: str) -> None:
    first, rest = FORMS[form]
    answer = create(server, first + rest, **ONE | {"parallel_tool_calls": True})
    assert len(answer.choices[0].message.tool_calls) == 2
    assert answer.usage.completion_tokens == len(ids(first + rest)) + 1
    none = create(server, first + rest, tool_choice="none", **ONE)
    assert none.choices[0].message.content == first + rest


def test_choices_end_apart(server: RunningServer, form: str) -> None:
    first, rest = FORMS[form]
    answers = (first + rest + "x" * 500, "It is sunny, as it always is here. " * 9, "y" * 200 + first)
    answer = create(server, *answers, n=3, **ONE)
    has_call = [bool(choice.message.tool_calls) for choice in answer.choices]
    # A call of Llama's is the whole answer.
    assert has_call == [True, False, form != "llama3_json"]
    assert answer.choices[1].message.content == answers[1]
    assert answer.usage.completion_tokens == sum(len(choice.model_extra["token_ids"]) for choice in answer.choices)
    assert len(answer.choices[0].model_extra["token_ids"]) == len(first)


def test_an_end_that_comes_with_the_call_is_one(server: RunningServer, form: str) -> None:
    first, _ = FORMS[form]
    for fields in ({"max_tokens": len(first)}, {"max_tokens": len(first) + 1}, {"stop": "x"}):
        answer = create(server, first, **ONE, **fields)
        assert called(answer.choices[0].message) == [("weather", ARGUMENTS)]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.completion_tokens == len(first)
    cut = create(server, first, **ONE, max_tokens=len(first) - 1)
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_came_together_are_cut_at_the_same_place(stream: bool) -> None:
    with running(auto=False, tool_call_parser="hermes") as server:
        server.on_loop(lambda: server.engine.script(ids(WEATHER + NOW * 3)))
        body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        connection = connect(server, "/v1/chat/completions", body | options)
        server.wait_until(lambda: bool(server.engine.sequences))
        server.on_loop(lambda: server.engine.step(len(WEATHER) + 20))
        server.wait_until(lambda: not server.engine.sequences)
        assert server.engine.steps == len(WEATHER) + 20
        assert [type(command) for command in server.engine.sent].count(Cancel) == 1
        assert [command.kind for command in server.engine.sent if isinstance(command, Release)] == ["tools:weather"]
        if stream:
            text = read_to_end(connection).decode()
            assert f'"completion_tokens":{len(WEATHER)},' in text
            assert text.count('"type":"function"') == 1
        else:
            answer = json.loads(connection.recv(1 << 16).partition(b"\r\n\r\n")[2])
            assert answer["usage"]["completion_tokens"] == len(WEATHER)
            assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
        server.assert_nothing_left()


def test_a_call_that_is_not_closed_is_over_when_something_else_comes() -> None:
    text = WEATHER.removesuffix("</tool_call>")
    with running(tool_call_parser="hermes") as server:
        answer = create(server, text + " so" + "x" * 300, **ONE)
        assert called(answer.choices[0].message) == [("weather", ARGUMENTS)]
        assert answer.usage.completion_tokens == len(text) + 2
        assert answer.choices[0].finish_reason == "tool_calls"


def test_calls_in_reasoning_are_none() -> None:
    with running(tokenizer=byte_tokenizer(THINKS), tool_call_parser="hermes") as server:
        text = f"Perhaps {NOW}?</think>{WEATHER}"
        answer = create(server, text + NOW, **ONE)
        assert called(answer.choices[0].message) == [("weather", ARGUMENTS)]
        assert answer.usage.completion_tokens == len(text)


def test_where_a_grammar_allows_one_call_it_ends_the_answer() -> None:
    with running(tool_call_parser="hermes") as server:
        answer = create(server, WEATHER, tool_choice="required", **ONE)
        assert answer.usage.completion_tokens == len(WEATHER) + 1
        assert not [command for command in server.engine.sent if isinstance(command, Cancel)]


# ---- ids that the model gives its calls


def test_ids_of_mistrals_calls_are_those_of_the_model() -> None:
    text = "[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]" + ARGUMENTS
    more = "[TOOL_CALLS]now[CALL_ID]zzzzzzzz9[ARGS]{}"
    with running(tool_call_parser="mistral") as server:
        (choice,) = create(server, text + more).choices
        assert called(choice.message) == [("weather", ARGUMENTS), ("now", "{}")]
        assert [call.id for call in choice.message.tool_calls] == ["a1B2c3D4e", "zzzzzzzz9"]
        (stream,) = streamed(create(server, text + more, stream=True))
        assert stream.ids == ["a1B2c3D4e", "zzzzzzzz9"]
        assert create(server, text + more, **ONE).usage.completion_tokens == len(text)
        for wrong in (
            "[TOOL_CALLS]now[CALL_ID][ARGS]{}",
            "[TOOL_CALLS]now[CALL_ID]a[ARG]{}",
            "[TOOL_CALLS]now[CALL]a[ARGS]{}",
        ):
            (choice,) = create(server, wrong).choices
            assert (choice.message.content, choice.message.tool_calls) == (wrong, None)
        (choice,) = create(server, "[TOOL_CALLS]now[ARGS]{}" + more).choices
        assert len(choice.message.tool_calls[0].id) == 9
        assert choice.message.tool_calls[1].id == "zzzzzzzz9"


def test_a_required_call_of_such_a_model_has_an_id() -> None:
    tokenizer = byte_tokenizer(CHATML + "{# [TOOL_CALLS] [CALL_ID] [ARGS] #}", special=["[CALL_ID]"])
    marker = tokenizer.token_to_id("[CALL_ID]")
    script = [*ids("[TOOL_CALLS]now"), marker, *ids("abcdefghi[ARGS]{}")]
    with running(tokenizer=tokenizer) as server:
        server.on_loop(lambda: server.engine.script(script))
        (choice,) = create(server, tool_choice="required").choices
        assert choice.message.tool_calls[0].id == "abcdefghi"
        sent = [command for command in server.engine.sent if isinstance(command, Generate)]
        assert f'"now" <[{marker}]> /[A-Za-z0-9]{{9}}/ "[ARGS]" %json' in sent[0].grammar.text


def test_the_events_of_a_stream_that_ends_with_a_call() -> None:
    with running(tool_call_parser="hermes") as server:
        server.on_loop(lambda: server.engine.script(ids(NOW + WEATHER)))
        *events, done = sse(server.chat(tools=TOOLS, parallel_tool_calls=False, stream=True, max_tokens=500).text)
        assert done == "[DONE]"
        last = json.loads(events[-1])["choices"][0]
        assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "tool_calls", None)
