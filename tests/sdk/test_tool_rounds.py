from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from tests.sdk import fake_model as model
from tests.sdk.fake_host import FakeHost
from weft.abi.operations import Op
from weft.sdk import Context, InvalidRequest, LimitExceeded, ToolCall, Unsupported, http, tool
from weft.sdk.tool_rounds import AnswerCalls
from weft.sdk.toolbox import execute, schemas


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_the_model_calls_reads_and_goes_on_in_the_same_kv() -> None:
    host = FakeHost("Let me look." + call("fetch", url="http://a/"), "It rains.")
    host.web["http://a/"] = (200, {}, b"rain")

    async def main() -> str:
        async with Context(tools=[{"name": "fetch", "parameters": {}}]) as ctx:
            ctx.user("Weather?")
            async for request in ctx.tool_calls():
                assert (request.name, request.arguments, request.id) == ("fetch", {"url": "http://a/"}, "call00000")
                ctx.tool(request, await http.get(request.url))
            assert ctx.tokens == host.sequences[ctx.sequence.number]
            written = ctx.chat.messages[1]
            assert written["content"] == "Let me look."
            assert json.loads(written["tool_calls"][0]["function"]["arguments"]) == {"url": "http://a/"}
            text = model.decode(ctx.tokens, False)
            assert "<|im_start|>tool\nrain<|im_end|>" in text
            return ctx.last_text

    assert host.run(main) == "It rains."
    assert host.ops(Op.SEQ_TRUNCATE) == []
    [told] = [command for command in host.log if command.op is Op.SEQ_EXPECT]
    assert told.blobs == [b"tool"], "the context says what it waits for"


def test_a_call_is_known_while_the_model_still_writes() -> None:
    host = FakeHost(call("a", x=1) + call("b"), "done")
    seen: list[tuple[str, bool]] = []

    async def main() -> None:
        ctx = Context()
        ctx.user("go")
        async for request in ctx.tool_calls():
            assert ctx.last is not None
            seen.append((request.name, ctx.last.ended))
            ctx.tool(request, {"ok": True})
        assert [message["role"] for message in ctx.chat.messages] == ["user", "assistant", "tool", "tool", "assistant"]

    host.run(main)
    assert seen[0] == ("a", False)
    assert seen[1][0] == "b"


@tool
async def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    a: the first
    """
    return a + b


@tool
def fail(text: str) -> str:
    """Always fails."""
    raise ValueError(text)


def test_functions_are_run_and_their_failures_told_to_the_model() -> None:
    host = FakeHost(call("add", a=1) + call("fail", text="no") + call("gone"), call("add"), "three")

    async def main() -> str:
        ctx = Context(tools=[add, fail])
        ctx.user("go")
        answer = await ctx.run_tools(max_rounds=3)
        results = [message["content"] for message in ctx.chat.messages if message["role"] == "tool"]
        assert results[:3] == ["3", "Error: ValueError: no", "Error: there is no tool gone"]
        assert results[3].startswith("Error: TypeError: add() missing")
        return answer

    assert host.run(main) == "three"


def test_ends_that_are_errors() -> None:
    async def endless() -> None:
        ctx = Context(tools=[add])
        ctx.user("go")
        with pytest.raises(LimitExceeded) as raised:
            await ctx.run_tools(max_rounds=2)
        assert raised.value.param == "max_rounds"

    FakeHost(*[call("add", a=1)] * 2).run(endless)

    async def unanswered() -> None:
        ctx = Context()
        ctx.user("go")
        with pytest.raises(InvalidRequest, match="no result yet: add"):
            async for _ in ctx.tool_calls():
                pass

    FakeHost(call("add", a=1)).run(unanswered)

    async def untrained() -> None:
        ctx = Context()
        ctx.user("go")
        for parser, message in ((None, "not trained"), ("other", "no parser other")):
            with pytest.raises(Unsupported, match=message):
                async for _ in ctx.tool_calls(parser=parser):
                    pass

    host = FakeHost()
    host.info["tool_call_parser"] = None
    host.run(untrained)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
        ("hermes", "<think>which?</think>\n" + call("add", a=1)),
    ],
)
def test_other_forms_and_reasoning(parser: str, text: str) -> None:
    host = FakeHost(text, "end")
    host.info["reasoning"] = True

    async def main() -> None:
        ctx = Context(tools=[add])
        ctx.user("go")
        assert await ctx.run_tools(parser=parser) == "end"
        assert ctx.chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert ctx.chat.messages[1].get("reasoning_content") == ("which?" if "think" in text else None)

    host.run(main)


def test_a_call_that_was_cut_off() -> None:
    host = FakeHost(call("add", a=12345), "end")
    cut = len('<tool_call>\n{"name": "add", "arguments": {"a": 12')

    async def main() -> None:
        ctx = Context()
        ctx.user("go")
        async for request in ctx.tool_calls(max_tokens=cut):
            assert request.text == '{"a": 12'
            with pytest.raises(InvalidRequest, match="not a JSON object"):
                _ = request.a
            ctx.tool(request, await execute(request, [add]))
        results = [message["content"] for message in ctx.chat.messages if message["role"] == "tool"]
        assert results == ['Error: the arguments of the call of add are not a JSON object: {"a": 12']

    host.run(main)


@dataclass
class Place:
    city: str
    near: bool


def test_schemas_from_types() -> None:
    def search(
        query: Annotated[str, "what to look for"],
        kind: Literal["web", "news"],
        places: list[Place],
        limit: int | None = None,
        rest: dict[str, float] = {},  # noqa: B006
    ) -> str:
        """Search the web.

        More about it.
        kind: where to look
        """
        return query

    found = tool(search)
    function = found.schema["function"]
    assert (function["name"], function["description"]) == ("search", "Search the web.")
    place = {"type": "object", "properties": {"city": {"type": "string"}, "near": {"type": "boolean"}}}
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "kind": {"enum": ["web", "news"], "description": "where to look"},
            "places": {"type": "array", "items": {**place, "required": ["city", "near"]}},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "rest": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["query", "kind", "places"],
    }
    assert found("x", "web", []) == "x"
    assert schemas([found, {"name": "raw"}])[0][1] == {"type": "function", "function": {"name": "raw"}}


def test_functions_that_cannot_be_tools() -> None:
    def strange(x: complex) -> None:
        pass

    def many(*args: int) -> None:
        pass

    for function, message in ((strange, "no JSON form"), (many, "only parameters with names")):
        with pytest.raises(InvalidRequest, match=message):
            tool(function)


def test_arguments_as_attributes() -> None:
    request = ToolCall("id", "f", '{"city": "Lima"}')
    assert request.city == "Lima"
    with pytest.raises(AttributeError, match="has no argument country"):
        _ = request.country


def test_a_call_keeps_the_id_that_the_model_gave_it() -> None:
    parser = AnswerCalls("mistral", reasoning=False)
    parser.push('[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}')
    parser.finish()
    assert [call.id for call in parser.calls] == ["a1B2c3D4e", "call00001"]
