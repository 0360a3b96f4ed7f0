"""Calls of tools and reasoning, with the official client, over an engine that writes what a test says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import openai
import pytest

from tests.server.conftest import MODEL, RunningServer, ids, running, sse
from tests.tokenizers.templates import BRACKETS
from weft.core.grammar import Grammar
from weft.core.wire import Generate
from weft.endpoints.dialect import Dialect
from weft.endpoints.grammars import CallableTool, Calls, answer_grammar, triggered_grammar
from weft.testing.byte_tokenizer import CHATML, byte_tokenizer
from weft.tokenizers.load import load_tokenizer

MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    template = load_tokenizer("weft-tiny").chat_template().source
    with running(tokenizer=byte_tokenizer(template)) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """A server whose model writes calls as Hermes does."""
    yield shared
    shared.assert_nothing_left()


def create(server: RunningServer, *answers: str, **fields):
    """Ask, where the model answers so."""
    server.on_loop(lambda: server.engine.script(*(ids(answer) for answer in answers)))
    return server.openai().chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "tools": TOOLS} | fields)


def grammar_of(server: RunningServer) -> Grammar | None:
    """Of the last generation."""
    sent = server.on_loop(lambda: [c for c in server.engine.sent if isinstance(c, Generate)])
    return sent[-1].grammar


def called(message) -> list[tuple[str, str]]:
    assert all(call.type == "function" for call in message.tool_calls or ())
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


class Streamed:
    """A choice's stream, put together as clients do, with the rules of its form checked."""

    def __init__(self) -> None:
        self.content, self.reasoning, self.finish_reason = "", "", None
        self.calls: list[tuple[str, str]] = []
        self.ids: list[str] = []

    def add(self, choice) -> None:
        delta = choice.delta
        assert self.finish_reason is None
        self.content += delta.content or ""
        self.reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type) == (len(self.calls), "function")
                assert call.function.arguments == ""
                self.ids.append(call.id)
                self.calls.append((call.function.name, ""))
            else:
                assert call.type is None
                assert call.function.name is None
                name, arguments = self.calls[call.index]
                self.calls[call.index] = name, arguments + call.function.arguments
        self.finish_reason = choice.finish_reason


def streamed(chunks, n: int = 1) -> list[Streamed]:
    choices = [Streamed() for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            choices[choice.index].add(choice)
    return choices


def test_a_call(server: RunningServer) -> None:
    (choice,) = create(server, WEATHER).choices
    assert called(choice.message) == [("weather", '{"city": "Oslo", "days": 2}')]
    assert choice.message.tool_calls[0].id.startswith("call_")
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_several_calls_after_text(server: RunningServer) -> None:
    text = f"Let me look.\n{WEATHER}\n{NOW}"
    (choice,) = create(server, text).choices
    assert choice.message.content == "Let me look.\n"
    assert called(choice.message) == [("weather", '{"city": "Oslo", "days": 2}'), ("now", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    (stream,) = streamed(create(server, text, stream=True))
    assert (stream.content, stream.calls) == (choice.message.content, called(choice.message))
    assert stream.finish_reason == "tool_calls"
    assert len(set(stream.ids)) == 2


def test_only_one_call_where_asked_for(server: RunningServer) -> None:
    (choice,) = create(server, WEATHER + NOW, parallel_tool_calls=False).choices
    assert called(choice.message) == [("weather", '{"city": "Oslo", "days": 2}')]
    (stream,) = streamed(create(server, WEATHER + NOW, parallel_tool_calls=False, stream=True))
    assert stream.calls == called(choice.message)


@pytest.mark.parametrize("text", ["It is sunny.", "", "a <tool_call", "<tool_call>{no}</tool_call>", "  "])
def test_text_without_calls(server: RunningServer, text: str) -> None:
    (choice,) = create(server, text).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    (stream,) = streamed(create(server, text, stream=True))
    assert (stream.content, stream.calls, stream.finish_reason) == (text, [], "stop")


def test_a_call_that_the_length_cuts(server: RunningServer) -> None:
    (choice,) = create(server, WEATHER, max_tokens=60).choices
    assert choice.finish_reason == "length"
    name, arguments = called(choice.message)[0]
    assert name == "weather"
    assert '{"city": "Oslo", "days": 2}'.startswith(arguments)
    (stream,) = streamed(create(server, WEATHER, max_tokens=60, stream=True))
    assert (stream.calls, stream.finish_reason) == ([(name, arguments)], "length")


def test_choices_are_read_apart(server: RunningServer) -> None:
    answers = (WEATHER, "No.", NOW)
    whole = create(server, *answers, n=3)
    streams = streamed(create(server, *answers, n=3, stream=True), 3)
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop", "tool_calls"]
    assert [called(choice.message) for choice in whole.choices] == [stream.calls for stream in streams]
    assert [choice.message.content or "" for choice in whole.choices] == [stream.content for stream in streams]


def test_details_of_tokens_stay_complete(server: RunningServer) -> None:
    details = {"logprobs": True, "top_logprobs": 1, "extra_body": {"return_token_ids": True}}
    (choice,) = create(server, WEATHER, **details).choices
    expected = [*ids(WEATHER), 256]
    assert choice.model_extra["token_ids"] == expected
    assert len(choice.logprobs.content) == len(expected)
    chunks = list(create(server, WEATHER, stream=True, **details))
    told = [token for chunk in chunks for part in chunk.choices for token in part.model_extra.get("token_ids") or ()]
    assert told == expected
    logprobs = [entry for chunk in chunks for part in chunk.choices if part.logprobs for entry in part.logprobs.content]
    assert len(logprobs) == len(expected)
    assert streamed(chunks)[0].calls == called(choice.message)


def test_the_events_of_a_stream(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.script(ids(NOW)))
    *events, done = sse(server.chat(tools=TOOLS, stream=True, max_tokens=100).text)
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    call_id = deltas[1]["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "now", "arguments": ""}}]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces(deltas[2:-1])),
        {},
    ]
    assert "".join(pieces(deltas[2:-1])) == "{}"
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "tool_calls"


def pieces(deltas: list[dict]) -> list[str]:
    return [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas]


def test_a_conversation_goes_on_with_what_the_tool_said(server: RunningServer) -> None:
    message = create(server, f"Hm. {WEATHER}").choices[0].message
    turns = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun."},
    ]
    answer = create(server, "Sunny.", messages=turns, extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == "Sunny."
    prompt = bytes(token for token in answer.model_extra["prompt_token_ids"] if token < 256).decode()
    assert f"Hm. \n{WEATHER}" in prompt
    assert "tool\nSun." in prompt
    assert "weather(city, days): Forecast." in prompt


def test_none_renders_tools_and_reads_nothing(server: RunningServer) -> None:
    (choice,) = create(server, WEATHER, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (WEATHER, None)
    assert choice.finish_reason == "stop"


def test_a_required_call_is_a_grammar(server: RunningServer) -> None:
    weather = CallableTool("weather", PARAMETERS, path="tools[0].function.parameters")
    now = CallableTool("now", {"type": "object", "properties": {}, "additionalProperties": False})
    hermes = Dialect("hermes")

    def expected(tools: list[CallableTool], *, only_one: bool) -> Grammar | None:
        return answer_grammar(hermes, Calls(tools, only_one), None, reasoning_opened=False)

    assert called(create(server, NOW, tool_choice="required").choices[0].message) == [("now", "{}")]
    assert grammar_of(server) == expected([weather, now], only_one=False)
    create(server, NOW, tool_choice="required", parallel_tool_calls=False)
    assert grammar_of(server) == expected([weather, now], only_one=True)
    create(server, WEATHER, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert grammar_of(server) == expected([weather], only_one=True)
    create(server, WEATHER, tool_choice=allowed("weather"))
    assert grammar_of(server) == expected([weather], only_one=False)
    create(server, WEATHER, tool_choice=allowed("now", "weather"), parallel_tool_calls=False)
    assert grammar_of(server) == expected([weather, now], only_one=True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_that_is_asked_for_wins_over_a_form_of_the_text(server: RunningServer, choice) -> None:
    create(server, NOW, tool_choice=choice)
    alone = grammar_of(server)
    assert alone is not None
    (answer,) = create(server, NOW, tool_choice=choice, response_format={"type": "json_object"}).choices
    assert called(answer.message) == [("now", "{}")]
    assert grammar_of(server) == alone


def test_a_call_that_the_model_may_make_is_held_to_the_tools(server: RunningServer) -> None:
    strict = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    hermes = Dialect("hermes")

    def expected(*tools: CallableTool, only_one: bool = False) -> Grammar:
        return triggered_grammar(hermes, Calls(tools, only_one), reasoning_opened=False)

    weather, now = CallableTool("weather", PARAMETERS, path="tools[0].function.parameters"), CallableTool("now", {})
    create(server, NOW)
    assert grammar_of(server) == expected(weather, now)
    create(server, NOW, tools=strict)
    assert grammar_of(server) == expected(weather._replace(strict=True), now)
    create(server, NOW, parallel_tool_calls=False)
    assert grammar_of(server) == expected(weather, now, only_one=True)
    create(server, NOW, tool_choice=allowed("now", mode="auto"))
    assert grammar_of(server) == expected(now)
    create(server, NOW, tool_choice="none")
    assert grammar_of(server) is None


def test_a_call_of_another_tool_is_content(server: RunningServer) -> None:
    text = f"{WEATHER.replace('weather', 'snow')} {NOW}"
    (choice,) = create(server, text).choices
    assert choice.message.content == text.removesuffix(NOW)
    assert called(choice.message) == [("now", "{}")]
    (stream,) = streamed(create(server, text, stream=True))
    assert (stream.content, stream.calls) == (choice.message.content, [("now", "{}")])
    (choice,) = create(server, WEATHER, tool_choice=allowed("now", mode="auto")).choices
    assert (choice.message.content, choice.finish_reason) == (WEATHER, "stop")


@pytest.mark.parametrize("stop", [{"stop": "days"}, {"extra_body": {"stop_token_ids": ids("2")}}])
def test_a_call_that_a_stop_cuts_is_content(server: RunningServer, stop: dict) -> None:
    for text, complete in ((WEATHER, []), (NOW + WEATHER, [("now", "{}")])):
        (choice,) = create(server, text, **stop).choices
        (stream,) = streamed(create(server, text, stream=True, **stop))
        assert called(choice.message) == stream.calls == complete
        assert choice.finish_reason == stream.finish_reason == ("tool_calls" if complete else "stop")
        assert choice.message.content == stream.content
        assert stream.content.startswith('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"')


def test_arguments_are_streamed_unless_a_stop_may_cut_them(server: RunningServer) -> None:
    def num_pieces(**fields) -> int:
        chunks = list(create(server, WEATHER, stream=True, **fields))
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        return sum(bool(call.function.arguments) for call in calls)

    assert num_pieces(stop="Bergen") == 1
    assert num_pieces() > 1


BAD_LLAMA = (
    '{"name": "weather", "parameters": {"city": Oslo}}',
    '{"name": "snow", "parameters": {}}',
    '{"name": "weather", "parameters": {"city": "Os',
)


@pytest.mark.parametrize("text", BAD_LLAMA)
def test_where_no_marker_triggers_a_grammar_a_wrong_call_is_content(text: str) -> None:
    with running(tool_call_parser="llama3_json") as server:
        (choice,) = create(server, text).choices
        (stream,) = streamed(create(server, text, stream=True))
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        assert (stream.content, stream.calls, stream.finish_reason) == (text, [], "stop")


def test_a_form_of_the_text_beside_tools_allows_both(server: RunningServer) -> None:
    (choice,) = create(server, NOW, response_format={"type": "json_object"}).choices
    assert called(choice.message) == [("now", "{}")]
    grammar = grammar_of(server)
    assert grammar is not None
    assert grammar.text.startswith("start: (calls | body)\n")


def allowed(*names: str, mode: str = "required") -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def function(**fields) -> list[dict]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": function(name="two words")}, "tools[0].function.name"),
        ({"tools": function(name="x" * 65)}, "tools[0].function.name"),
        ({"tools": function(name="")}, "tools[0].function.name"),
        ({"tools": function(name=7)}, "tools[0].function.name"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters"),
        ({"tools": function() + function()}, "tools"),
        ({"tools": function() * 1025}, "tools"),
        ({"tools": function(), "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": function(), "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        ({"tools": function(), "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        (
            {"tools": function(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": function(), "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": function(), "tool_choice": allowed()}, "tool_choice.allowed_tools"),
        ({"tools": function(), "tool_choice": allowed("f", mode="some")}, "tool_choice.allowed_tools.mode"),
        ({"tools": function(), "tool_choice": allowed(*["f"] * 1025)}, "tool_choice.allowed_tools.tools"),
        ({"tools": function(strict="yes")}, "tools[0].function.strict"),
        ({"tools": function(), "tool_choice": allowed("f", "g")}, "tool_choice.allowed_tools.tools[1].function.name"),
        (
            {
                "tools": function(),
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [1]}},
            },
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"tools": function(parameters={"description": "x" * 70_000}), "tool_choice": "required"},
            "tools",
        ),
        ({"tools": function(), "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_named(server: RunningServer, fields: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        server.openai().chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
    assert wrong.value.param == param
    assert param.partition("[")[0].partition(".")[0] in wrong.value.message


def test_a_grammar_that_cannot_be_compiled_is_named_by_its_field(server: RunningServer) -> None:
    def fails(**fields) -> openai.BadRequestError:
        server.on_loop(lambda: server.engine.fail_next("invalid_request", "the grammar cannot be used", "grammar"))
        with pytest.raises(openai.BadRequestError) as wrong:
            create(server, **fields)
        return wrong.value

    assert fails(tool_choice="required").param == "tools"
    assert fails(tool_choice="required", stream=True).param == "tools"
    error = fails(tools=[], response_format={"type": "json_object"})
    assert error.param == "response_format"
    assert "the grammar cannot be used" in error.message


def test_an_unknown_form_is_refused_with_advice() -> None:
    with running() as server:
        for choice in ("auto", "required"):
            with pytest.raises(openai.BadRequestError) as wrong:
                create(server, tool_choice=choice)
            assert wrong.value.param == "tools"
            assert "--tool-call-parser" in wrong.value.message
        assert create(server, "Hi", tool_choice="none").choices[0].message.content == "Hi"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", WEATHER),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]'),
    ],
)
def test_the_form_may_be_set(parser: str, text: str) -> None:
    with running(tool_call_parser=parser) as server:
        (choice,) = create(server, text).choices
        assert called(choice.message) == [("weather", '{"city": "Oslo", "days": 2}')]
        assert choice.finish_reason == "tool_calls"


def test_markers_that_are_special_tokens_are_seen() -> None:
    tokenizer = byte_tokenizer(CHATML + "{# [TOOL_CALLS] #}", special=["[TOOL_CALLS]"])
    marker = tokenizer.token_to_id("[TOOL_CALLS]")
    with running(tokenizer=tokenizer) as server:
        server.on_loop(lambda: server.engine.script([marker, *ids('[{"name": "now", "arguments": {}}]')]))
        (choice,) = create(server, tool_choice="required").choices
        assert called(choice.message) == [("now", "{}")]
        assert f"calls: <[{marker}]> " in grammar_of(server).text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_template_with_ids_of_nine_characters_gets_such_ids(is_streamed: bool) -> None:
    calls = json.dumps([{"name": name, "arguments": {}} for name in ("weather", "now")])
    with running(tokenizer=byte_tokenizer(BRACKETS.replace("[CALLS]", "[TOOL_CALLS]"))) as server:
        answer = create(server, f"[TOOL_CALLS]{calls}", stream=is_streamed)
        told = streamed(answer)[0].ids if is_streamed else [call.id for call in answer.choices[0].message.tool_calls]
        assert [bool(re.fullmatch("[a-zA-Z0-9]{9}", id)) for id in told] == [True, True]
        assert len(set(told)) == 2
        messages = [
            *MESSAGES,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
                    for id, name in zip(told, ("weather", "now"), strict=True)
                ],
            },
            *[{"role": "tool", "tool_call_id": id, "content": "fine"} for id in told],
        ]
        assert create(server, "Fine.", messages=messages).choices[0].message.content == "Fine."


# ---- reasoning


def test_reasoning_is_told_apart() -> None:
    text = f"Oslo is in Norway.\n</think>\n\nLet me look. {WEATHER}"
    with running(tokenizer=byte_tokenizer(THINKS), tool_call_parser="hermes") as server:
        (choice,) = create(server, text).choices
        assert choice.message.reasoning_content == "Oslo is in Norway."
        assert choice.message.content == "Let me look. "
        assert called(choice.message) == [("weather", '{"city": "Oslo", "days": 2}')]
        (stream,) = streamed(create(server, text, stream=True))
        assert (stream.reasoning, stream.content) == ("Oslo is in Norway.", "Let me look. ")
        assert stream.calls == called(choice.message)
        (unfinished,) = create(server, text, max_tokens=4, tools=[]).choices
        assert (unfinished.message.reasoning_content, unfinished.message.content) == ("Oslo", None)


def test_reasoning_that_the_last_message_has_begun_goes_on() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nLet me"}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    text = f" look.\n</think>\n\nIt rains. {WEATHER}"
    with running(tokenizer=byte_tokenizer(THINKS), tool_call_parser="hermes") as server:
        (choice,) = create(server, text, extra_body=fields).choices
        assert (choice.message.reasoning_content, choice.message.content) == (" look.", "It rains. ")
        assert called(choice.message) == [("weather", '{"city": "Oslo", "days": 2}')]
        (stream,) = streamed(create(server, text, stream=True, extra_body=fields))
        assert (stream.reasoning, stream.content) == (" look.", "It rains. ")


def test_grammars_begin_after_reasoning() -> None:
    with running(tokenizer=byte_tokenizer(THINKS)) as server:
        create(server, "{}", tools=[], response_format={"type": "json_object"})
        assert grammar_of(server).text.startswith("start: reasoning (body)\n")
    with running(reasoning_parser="think") as server:
        (choice,) = create(server, "<think>a</think>{}", tools=[], response_format={"type": "json_object"}).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("a", "{}")
        assert grammar_of(server).text.startswith("start: reasoning? (body)\n")
    with running(tokenizer=byte_tokenizer(THINKS), reasoning_parser="none") as server:
        (choice,) = create(server, "a</think>b", tools=[]).choices
        assert choice.message.content == "a</think>b"
        assert "reasoning_content" not in choice.message.model_extra
