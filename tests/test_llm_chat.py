"""Chats of the offline API: calls of tools, formats and reasoning, read as the server reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from tests.server.conftest import running
from weft.abi.errors import InvalidRequest, Unsupported
from weft.core.grammar import Grammar
from weft.core.wire import Generate
from weft.llm import LLM, Result
from weft.testing.byte_tokenizer import CHATML, byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.load import load_tokenizer

ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
JSON = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
HERMES = load_tokenizer("weft-tiny").chat_template().source
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


class Scripted:
    """An LLM whose model generates the texts that a test gives it."""

    def __init__(self, template: str, special: Sequence[str] = ()):
        self.engine = FakeEngine()
        self.llm = LLM.over(lambda: self.engine, byte_tokenizer(template, special=special))

    def answers(self, *texts: str) -> None:
        self.engine.script(*(list(text.encode()) for text in texts))

    def prompt(self, result: Result) -> str:
        """The text of a result's prompt, special tokens included."""
        return self.llm.tokenizer.decode(result.prompt_token_ids, skip_special=False)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the last generation."""
        return [command for command in self.engine.sent if isinstance(command, Generate)][-1].grammar


@pytest.fixture
def hermes() -> Iterator[Scripted]:
    made = Scripted(HERMES)
    yield made
    made.llm.close()


@pytest.fixture
def thinker() -> Iterator[Scripted]:
    made = Scripted(THINKS)
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("weft-tiny", num_pages=256, max_running=8) as llm:
        yield llm


def test_a_call_is_read_and_can_be_answered(hermes: Scripted) -> None:
    hermes.answers("Let me see.\n" + CALL)
    [result] = hermes.llm.chat(ASK, tools=TOOLS)
    assert "<tools>\nweather(city)\n</tools>" in hermes.prompt(result)
    assert result.text == "Let me see.\n" + CALL
    assert result.finish_reason == "tool_calls"
    message = result.message
    [call] = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", "Let me see.\n")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    hermes.answers("Rain.")
    told = [*ASK, message, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    [result] = hermes.llm.chat(told, tools=TOOLS)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in hermes.prompt(result)
    assert "<|im_start|>tool\nrain<|im_end|>" in hermes.prompt(result)
    assert (result.message, result.finish_reason) == ({"role": "assistant", "content": "Rain."}, "stop")


def test_without_tools_what_looks_like_a_call_is_content(hermes: Scripted) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        hermes.answers(CALL)
        [result] = hermes.llm.chat(ASK, **options)
        assert (result.message, result.finish_reason) == ({"role": "assistant", "content": CALL}, "stop")
        assert hermes.grammar is None


def test_the_first_call_is_the_last_without_parallel_ones(hermes: Scripted) -> None:
    hermes.answers(CALL + CALL)
    [result] = hermes.llm.chat(ASK, tools=TOOLS, parallel_tool_calls=False)
    assert len(result.message["tool_calls"]) == 1
    assert result.text == CALL


def test_a_call_that_a_stop_string_cuts_is_content(hermes: Scripted) -> None:
    hermes.answers(CALL)
    [result] = hermes.llm.chat(ASK, tools=TOOLS, stop=["Oslo"])
    begun = CALL[: CALL.index("Oslo")]
    assert (result.message, result.finish_reason) == ({"role": "assistant", "content": begun}, "stop")


def test_markers_that_are_special_tokens_are_read() -> None:
    scripted = Scripted(CHATML + "{# [TOOL_CALLS] #}", ["[TOOL_CALLS]"])
    try:
        marker = scripted.llm.tokenizer.token_to_id("[TOOL_CALLS]")
        scripted.engine.script([marker, *b'[{"name": "weather", "arguments": {}}]'])
        [result] = scripted.llm.chat(ASK, tools=TOOLS)
        [call] = result.message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": "{}"}
    finally:
        scripted.llm.close()


def test_reasoning_is_told_apart(thinker: Scripted) -> None:
    thinker.answers("hmm\n</think>\n\nYes.", "endless")
    first, second = thinker.llm.chat([ASK, ASK])
    read = {json.dumps(result.message) for result in (first, second)}
    assert read == {
        json.dumps({"role": "assistant", "content": "Yes.", "reasoning_content": "hmm"}),
        json.dumps({"role": "assistant", "content": None, "reasoning_content": "endless"}),
    }


def test_the_parsers_can_be_chosen() -> None:
    engine = FakeEngine()
    tokenizer = byte_tokenizer(THINKS)
    with LLM.over(lambda: engine, tokenizer, tool_call_parser="hermes", reasoning_parser="none") as llm:
        engine.script(list(b"hmm</think>" + CALL.encode()))
        [result] = llm.chat(ASK, tools=TOOLS)
    assert result.message["content"] == "hmm</think>"
    assert result.finish_reason == "tool_calls"


def test_a_reasoning_effort_reaches_the_template() -> None:
    engine = FakeEngine()
    with LLM.over(lambda: engine, byte_tokenizer("{{ reasoning_effort }}{{ other }}")) as llm:
        [result] = llm.chat(ASK, reasoning_effort="low", max_tokens=1, template={"template_kwargs": {"other": "!"}})
        assert llm.tokenizer.decode(result.prompt_token_ids) == "low!"


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters", "JSON schema"),
        ({"tools": [{"function": {"name": "f", "paramters": {}}}]}, "tools[0].function.paramters", "Did you mean"),
        ({"tools": "weather"}, "tools", "array"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "must be"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", '"schema"'),
        ({"response_format": JSON, "grammar": Grammar.regex("a")}, "response_format", "grammar"),
        ({"tools": TOOLS, "grammar": Grammar.regex("a")}, "tools", "grammar"),
        ({"tool": TOOLS}, "tool", "did you mean tools"),
    ],
)
def test_what_cannot_be_asked_names_its_place(hermes: Scripted, options: dict, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        hermes.llm.chat(ASK, **options)
    assert raised.value.param == param
    assert hermes.engine.sent == []


def test_a_model_that_calls_in_no_known_form() -> None:
    engine = FakeEngine()
    with LLM.over(lambda: engine, byte_tokenizer()) as llm, pytest.raises(Unsupported, match="--tool-call-parser"):
        llm.chat(ASK, tools=TOOLS)


def test_options_of_chats_are_none_of_prompts(hermes: Scripted) -> None:
    with pytest.raises(InvalidRequest, match="no option 'tools'"):
        hermes.llm.generate("text", tools=TOOLS)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "stop": ["Oslo"]},
        {"response_format": JSON},
        {"stop": ["in"]},
        {},
    ],
)
def test_the_answer_and_its_grammar_are_the_servers(hermes: Scripted, fields: dict) -> None:
    hermes.answers("It rains in " + CALL)
    [result] = hermes.llm.chat(ASK, seed=1, **fields)
    with running(tokenizer=byte_tokenizer(HERMES)) as server:
        server.on_loop(lambda: server.engine.script(list(("It rains in " + CALL).encode())))
        body = {"messages": ASK, "seed": 1, "return_token_ids": True, **fields}
        answer = server.post("/v1/chat/completions", body).json()
        [choice] = answer["choices"]
        sent = [command for command in server.engine.sent if isinstance(command, Generate)]
    assert (sent[-1].grammar, choice["finish_reason"]) == (hermes.grammar, result.finish_reason)
    assert answer["prompt_token_ids"] == result.prompt_token_ids
    told = {name: value for name, value in choice["message"].items() if name != "refusal"}
    for message in (told, result.message):
        for call in message.get("tool_calls", []):
            call.pop("id")
    assert told == result.message


def test_a_real_model_keeps_to_tools_and_formats(tiny: LLM) -> None:
    [called] = tiny.chat(ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=64, seed=3)
    assert called.finish_reason == "tool_calls"
    [call] = called.message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    [held] = tiny.chat(ASK, response_format=JSON, max_tokens=64, seed=3)
    assert msgspec.json.decode(held.message["content"])["city"] in ("Oslo", "Rome")
    assert held.text == held.message["content"]
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(InvalidRequest, match="response_format") as raised:
        tiny.chat(ASK, response_format=broken)
    assert raised.value.param == "response_format"


def test_a_stream_is_as_the_model_writes_it(tiny: LLM) -> None:
    # Without the grammar this model answers in prose.
    options = {"response_format": JSON, "max_tokens": 64, "seed": 3}
    [whole] = tiny.chat(ASK, **options)
    assert json.loads(whole.text)["city"] in ("Oslo", "Rome")
    assert "".join(chunk.text for chunk in tiny.stream_chat(ASK, **options)) == whole.text


def test_a_stream_ends_with_its_only_call(hermes: Scripted) -> None:
    hermes.answers(CALL + CALL)
    chunks = list(hermes.llm.stream_chat(ASK, tools=TOOLS, parallel_tool_calls=False))
    assert "".join(chunk.text for chunk in chunks) == CALL
    assert chunks[-1].finish_reason == "tool_calls"
    assert len(chunks[-1].message["tool_calls"]) == 1


def test_a_stream_has_calls_and_reasoning_in_parts(thinker: Scripted, hermes: Scripted) -> None:
    thinker.answers("Cold there.\n</think>\n\nIt rains.")
    chunks = list(thinker.llm.stream_chat(ASK))
    deltas = [delta for chunk in chunks for delta in chunk.deltas]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Cold there."
    assert "".join(delta.get("content", "") for delta in deltas) == "It rains."
    assert [chunk.message for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].message == {"role": "assistant", "content": "It rains.", "reasoning_content": "Cold there."}

    hermes.answers("Let me see.\n" + CALL)
    chunks = list(hermes.llm.stream_chat(ASK, tools=TOOLS))
    [start, *rest] = [call for chunk in chunks for delta in chunk.deltas for call in delta.get("tool_calls", [])]
    [call] = chunks[-1].message["tool_calls"]
    assert (start["id"], start["type"], start["function"]["name"]) == (call["id"], "function", "weather")
    assert "".join(piece["function"]["arguments"] for piece in rest) == call["function"]["arguments"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert "".join(delta.get("content", "") for chunk in chunks for delta in chunk.deltas) == "Let me see.\n"
    # The message may be appended to the conversation as it is.
    hermes.answers("Rain.")
    answer = [*ASK, chunks[-1].message, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    assert hermes.llm.chat([answer], tools=TOOLS)[0].text == "Rain."


def test_several_streamed_answers_are_read_apart(hermes: Scripted) -> None:
    hermes.answers(CALL, "It rains.")
    chunks = list(hermes.llm.stream_chat(ASK, tools=TOOLS, n=2))
    ends = {chunk.index: chunk for chunk in chunks if chunk.finish_reason is not None}
    assert [ends[index].finish_reason for index in range(2)] == ["tool_calls", "stop"]
    assert "tool_calls" not in ends[1].message
    assert ends[1].message["content"] == "It rains."
