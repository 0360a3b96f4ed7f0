"""Flows make the graphs that JSON makes, and say at once what cannot be traced."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest

import weft
from tests.workflow.shapes import body, function, graph, llm, loop, mapped, pick, switch, text
from weft import ops
from weft.workflow.frontend.flow import Flow
from weft.workflow.frontend.marks import NeedsValueError
from weft.workflow.frontend.row_source import InvalidRows
from weft.workflow.frontend.trace import FlowError
from weft.workflow.graph import InvalidGraph, digest, graph_from_dict, graph_to_dict
from weft.workflow.planning import plan


def traced(function: Callable[..., Any]) -> Flow:
    made = weft.flow(function)
    assert isinstance(made, Flow)
    return made


def same(flow: Callable[..., Any], raw: dict[str, Any]) -> None:
    assert traced(flow).digest == digest(graph_from_dict(raw))


@dataclasses.dataclass
class Verdict:
    winner: str
    sure: bool


def test_a_chat_and_a_text() -> None:
    def flow(q: Any) -> Any:
        answer = ops.llm([ops.system("Be short."), ops.user(f"Answer: {q}")], max_tokens=5, temperature=0)
        return {"out": ops.text(f"{answer}!")}

    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Answer: {{q}}"}]
    call = {"id": "a", "op": "llm", "messages": messages, "max_tokens": 5, "temperature": 0}
    same(flow, graph(call, text("t", "{{a}}!"), outputs={"out": "t"}))


def test_a_conversation_goes_on() -> None:
    def flow(q: Any) -> Any:
        first = ops.llm(q)
        return {"out": ops.llm([first.chat, ops.user("Revise it.")])}

    more = {"id": "b", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "Revise it."}]}
    same(flow, graph(llm("a", "{{q}}"), more))


def test_fields_of_an_answer() -> None:
    def flow(q: Any) -> Any:
        verdict = ops.llm(q, schema=Verdict, name="verdict")
        return {"winner": verdict.winner, "whole": verdict}

    properties = {"winner": {"type": "string"}, "sure": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["winner", "sure"]}
    schema["additionalProperties"] = False
    same(flow, graph(llm("v", "{{q}}", schema=schema), outputs={"winner": "v.winner", "whole": "v"}))
    assert [node.id for node in traced(flow).graph.nodes] == ["verdict"]


def test_parts_of_values() -> None:
    def flow(q: Any) -> Any:
        made = {"a": q.strip(), "b": q.split(","), "c": q.regex("x"), "d": q.matches("y"), "e": q[1:3], "f": q["k"]}
        return {**made, "g": made["b"][0]}

    ways = {"a": {"strip": True}, "b": {"split": ","}, "c": {"regex": "x"}, "d": {"matches": "y"}}
    ways |= {"e": {"slice": [1, 3]}, "f": {"field": "k"}}
    nodes = [pick(name, "q", **way) for name, way in ways.items()]
    same(flow, graph(*nodes, pick("g", "b", field="0"), outputs={name: name for name in "abcdefg"}))


def test_a_map_over_parts_of_a_document() -> None:
    def flow(q: Any, topic: str = "risks") -> Any:
        notes = ops.map(
            lambda chunk: ops.llm(f"{topic} of {chunk} for {q}", max_tokens=9), ops.split(q, max_tokens=800)
        )
        return {"out": ops.llm(f"{ops.join(notes)}\n\n{q}")}

    inside = body(llm("note", "risks of {{i}} for {{q}}", max_tokens=9), value="note")
    parts = function("parts", "split", text="{{q}}", max_tokens=800)
    joined = function("joined", "join", of="{{notes}}", separator="\n\n")
    same(flow, graph(parts, mapped("notes", "parts", inside), joined, llm("out", "{{joined}}\n\n{{q}}")))


def test_rows_cannot_set_a_parameter_with_a_default() -> None:
    def flow(q: Any, topic: str = "risks") -> Any:
        return ops.text(f"{topic} of {q}")

    for run in (traced(flow).run, traced(flow).stream, traced(flow).explain):
        with pytest.raises(InvalidRows, match="the flow cannot take the column 'topic'"):
            run([{"q": "x", "topic": "y"}], "http://127.0.0.1:9")
    with pytest.raises(InvalidRows, match="the flow cannot take the column 'topic'"):
        plan(traced(flow), [{"q": "x", "topic": "y"}], "weft-tiny", [{"model": "weft-tiny", "kv_tokens": 1000}])


def test_a_loop_with_two_values() -> None:
    def flow(q: Any) -> Any:
        def round_(pro: Any, con: Any) -> Any:
            return ops.llm([pro.chat, ops.user(con)]), ops.llm([con.chat, ops.user(pro)])

        started = ops.llm(f"For {q}"), ops.llm(f"Against {q}")
        pro, con = ops.loop(round_, started, until=lambda pro, con: ops.matches(con, "agree"), max_rounds=4)
        return {"out": ops.text(f"{pro}/{con}")}

    one = {"id": "one", "op": "llm", "messages": [{"chat": "pro"}, {"role": "user", "content": "{{con}}"}]}
    two = {"id": "two", "op": "llm", "messages": [{"chat": "con"}, {"role": "user", "content": "{{pro}}"}]}
    inside = body(one, two, pick("ok", "two", matches="agree"), pro="one", con="two")
    rounds = loop("rounds", {"pro": "a", "con": "b"}, inside, until="ok", max_rounds=4)
    first = llm("a", "For {{q}}"), llm("b", "Against {{q}}")
    same(flow, graph(*first, rounds, text("t", "{{rounds.pro}}/{{rounds.con}}")) | {"outputs": {"out": "t"}})


def test_a_switch_with_a_default() -> None:
    def flow(q: Any) -> Any:
        kind = ops.llm(q, max_tokens=1)
        return {"out": ops.switch(kind, {"question": lambda: ops.llm(q), 7: lambda: q}, lambda: "neither")}

    cases = switch("s", "kind", question=body(llm("x", "{{q}}"), value="x"))
    cases["cases"]["7"] = body(value="q")
    cases["default"] = body({"id": "d", "op": "data", "value": "neither"}, value="d")
    same(flow, graph(llm("kind", "{{q}}", max_tokens=1), cases))


def test_work_outside_the_model() -> None:
    def measure(text: str, unit: str = "words") -> int:
        return len(text.split())

    def flow(q: Any) -> Any:
        size = ops.function(measure, q, unit=f"{q}s", pure=True)
        both = ops.list(size, "constant", [q])
        return {
            "out": ops.program("agent", {"task": [q, size]}),
            "ok": ops.external(schema={"type": "boolean"}),
            "b": both,
        }

    size = function("size", "measure", text="{{q}}", unit="{{q}}s") | {"pure": True}
    agent = {"id": "agent", "op": "program", "program": "agent", "args": {"task": ["{{q}}", "{{size}}"]}}
    person = {"id": "ok", "op": "external", "schema": {"type": "boolean"}}
    both = {"id": "b", "op": "list", "of": ["{{size}}", "constant", ["{{q}}"]]}
    same(flow, graph(size, agent, person, both, outputs={"out": "agent", "ok": "ok", "b": "b"}))
    assert traced(flow).functions == {"measure": measure}


def test_a_flow_in_a_flow() -> None:
    inner = traced(lambda text: ops.llm(f"Sum up: {text}"))

    def flow(q: Any) -> Any:
        return {"out": inner(inner(q))}

    same(flow, graph(llm("a", "Sum up: {{q}}"), llm("b", "Sum up: {{a}}"), outputs={"out": "b"}))


Pair = namedtuple("Pair", "left right")


def test_names_of_outputs() -> None:
    assert list(traced(lambda q: q).graph.outputs) == ["value"]
    assert list(traced(lambda q: (q, q)).graph.outputs) == ["value_1", "value_2"]
    assert list(traced(lambda q: Pair(q, "x")).graph.outputs) == ["left", "right"]


def test_json_of_a_flow_is_the_same_graph() -> None:
    flow = traced(lambda q: ops.llm("{{q}} and \\{{q}}", prompt=None, schema=Verdict))
    assert graph_from_dict(graph_to_dict(flow.graph)) == flow.graph


def test_an_inner_name_does_not_hide_an_outer_one() -> None:
    def flow(q: Any, items: Any) -> Any:
        return ops.map(lambda q_: ops.map(lambda q: ops.text(f"{q}{q_}{outer}"), items), items)

    outer = "{{q}}"
    (made,) = traced(flow).graph.nodes
    (inside,) = made.bodies["body"].nodes
    assert inside.item != "q"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "use"),
    [
        (lambda q: "yes" if q else "no", "ops.switch"),
        (lambda q: len(q), "ops.function"),
        (lambda q: q == "x", "value.matches"),
        (lambda q: q < "x", "ops.switch"),
        (lambda q: "x" in q, "value.matches"),
        (lambda q: list(q), "ops.map"),
        (lambda q: int(q), "ops.function"),
        (lambda q: f"{q:>10}", "ops.function"),
        (lambda q: q * 2, "ops.function"),
        (lambda q: "-" * q, "ops.function"),
        (lambda q: q + 1, "ops.function"),
        (lambda q: 1 + q, "ops.function"),
        (lambda q: q + {"x": 1}, "ops.function"),
        (lambda q: sum([q, q]), "ops.join"),
        (lambda q: q - q, "ops.function"),
        (lambda q: -q, "ops.function"),
        (lambda q: q**2 % 3, "ops.function"),
        (lambda q: divmod(7, q), "ops.function"),
        (lambda q: round(q, 1), "ops.function"),
        (lambda q: list(reversed(q)), "ops.function"),
        (lambda q: ",".join([q]), r"test_flow.py:\d+: sequence item 0.*ops.join"),
        (lambda q: json.dumps({"a": q}), r"test_flow.py:\d+: Object of type Variable.*ops.function"),
        (lambda q: ops.map(lambda item: re.sub("a", "b", item), q), r"test_flow.py:\d+: expected string.*ops.function"),
        (lambda q: f"{q.split(',')}", "ops.join"),
    ],
)
def test_what_needs_a_value_now_names_the_operator(wrong: Callable[[Any], Any], use: str) -> None:
    with pytest.raises(NeedsValueError, match=use):
        _ = traced(wrong).graph


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q: None, "returns nothing"),
        (lambda *q: q, "name each parameter"),
        (lambda q: ops.llm(q, name="x y"), "is not a name"),
        (lambda q: ops.llm(ops.llm(q, name="a"), name="a"), "is used already"),
        (lambda q: ops.llm(q, name="q"), "is used already"),
        (lambda q: ops.llm([3]), "is not a message"),
        (lambda q: ops.llm(q, schema=object()), "has no JSON schema"),
        (lambda q: ops.function(lambda: 1), "needs a name"),
        (lambda q: ops.llm(q, retries="x"), "Expected 'int', got 'str' - at '\\$.retries'"),
        (
            lambda q: ops.llm([{"role": "uzer", "content": "x"}]),
            "Invalid enum value 'uzer'; there are system, ",
        ),
        (lambda q: ops.loop(lambda a: a, q, until=True), r"until is a function of .*, and True is none"),
        (lambda q: ops.loop(lambda a: a, q, until=q), "until is a function of .*, and <variable :q: any> is none"),
        (lambda q: ops.loop(lambda a: a, q, at_limit="go"), "Invalid enum value 'go'; there are fail, stop - at"),
        (
            lambda q: ops.function(len, object()),
            r"test_flow.py:\d+: function.args.obj: a value of builtins.object is not",
        ),
        (lambda q: ops.function(dataclasses.replace, q, q), "positional"),
        (lambda q: ops.map(lambda: q, q), "takes 0 values and is given 1"),
        (lambda q: ops.map(str, q), r"str takes values: write lambda value: ops.function\(str, value\)"),
        (lambda q: ops.map(len, q), r"len takes values: write lambda value: ops.function\(len, value\)"),
        (lambda q: ops.loop(lambda a: (a, a), (q,)), "2 values are returned for a"),
        (lambda q: ops.loop(lambda a: {"b": a}, (q,)), "returns a, in this order; it returned b"),
    ],
)
def test_what_cannot_be_traced(wrong: Callable[..., Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        _ = traced(wrong).graph


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q: [q, q], r"data.value\[0\]: q is a value of a row, and a constant has none: ops.list\(.* as a tuple"),
        (lambda q: {"a": {"b": q}}, r"data.value.b: q is a value of a row, .* a mapping without others within"),
        (lambda q: q.strip, r"data.value: the text has the repr of the variable q.*value\['strip'\]"),
        (lambda q: ops.llm(q, temperature=q), r"llm.temperature: q is a value of a row, and this is the same for all"),
        (lambda q: ops.llm(q, stop=["x", q]), r"llm.stop\[1\]: q is a value of a row"),
        (lambda q: ops.map(_async_body, q), r"data.value: an async function was called, .* so write def"),
        (lambda q: object(), r"data.value: a value of builtins.object is not JSON: give a text"),
    ],
)
def test_what_is_no_json_has_its_place_and_a_remedy(wrong: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(FlowError, match=r"test_flow.py:\d+: (<lambda>: |_async_body: )?" + message):
        _ = traced(wrong).graph


async def _async_body(item: Any) -> Any:
    return item


def test_a_result_that_is_none_names_the_function_that_returned_it() -> None:
    def flow(q: Any) -> Any:
        return [q]

    with pytest.raises(FlowError, match=rf"^test_flow.py:{flow.__code__.co_firstlineno}: flow: data"):
        _ = traced(flow).graph


def _generator(q: Any) -> Any:
    yield q


class OfClass:
    def method(self, q: Any) -> Any:
        return q

    @staticmethod
    def alone(q: Any) -> Any:
        return q


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_async_body, r"test_flow.py:\d+: _async_body: an async function is no flow: write def"),
        (_generator, r"test_flow.py:\d+: _generator: a function with yield is no flow: return"),
        (OfClass.method, r"test_flow.py:\d+: method: a method is no flow: 'self' would"),
        ("text", r"a flow is made of a function, not 'text'"),
    ],
)
def test_only_plain_functions_are_flows(function: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        weft.flow(function)
    assert traced(OfClass.alone).graph.inputs == ("q",)


def test_a_value_of_a_body_does_not_leave_it() -> None:
    def flow(q: Any) -> Any:
        kept: list[Any] = []
        ops.map(lambda item: kept.append(ops.text(f"{item}")) or item, q)
        return kept[0]

    with pytest.raises(FlowError, match="was made in a body that has ended"):
        _ = traced(flow).graph


def test_mistakes_have_their_lines() -> None:
    def flow(q: Any) -> Any:
        first = ops.llm(q, max_tokens=0)
        return ops.llm(f"{first} {{{{nobody}}}}")

    with pytest.raises(InvalidGraph) as caught:
        _ = traced(flow).graph
    line = flow.__code__.co_firstlineno
    assert [mistake.place for mistake in caught.value.mistakes] == [
        f"test_flow.py:{line + 1}: llm_1.max_tokens",
        f"test_flow.py:{line + 2}: llm_2.messages[0].content",
    ]


def test_outside_a_flow_there_is_nothing_to_make() -> None:
    with pytest.raises(FlowError, match=r"@weft\.flow"):
        ops.text("x")
    with pytest.raises(FlowError, match="only other flows call it"):
        traced(lambda q: q)("x")


def test_building_imports_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys, weft; from weft import ops; assert weft.flow(lambda q: ops.llm(q)).digest; "
        "print([name for name in ('torch', 'numpy', 'starlette', 'httpx', 'sqlalchemy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
