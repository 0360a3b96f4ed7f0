"""The JSON Schema of graphs accepts what is a graph, and refuses nothing that the reader accepts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.examples.test_workflows import FLOWS
from tests.workflow.random_graphs import graphs
from tests.workflow.shapes import Json, body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import InvalidGraph, graph_from_dict, graph_schema, graph_to_dict
from weft.workflow.graph.node_checks import CALL_FIELDS
from weft.workflow.graph.nodes import NODES

SCHEMA = Draft202012Validator(graph_schema())
INSIDE = body(text("x"), v="x")
LIST = {"id": "items", "op": "list", "of": ["a", "{{q}}"]}
EVERY_OP: dict[str, Json] = {
    "llm": llm("a"),
    "text": text("a"),
    "data": {"id": "a", "op": "data", "value": None},
    "list": {**LIST, "id": "a"},
    "function": function("a", "measure", of="{{q}}"),
    "program": {"id": "a", "op": "program", "program": "agent"},
    "external": {"id": "a", "op": "external"},
    "pick": pick("a", "q", strip=True),
    "map": mapped("a", "q", INSIDE),
    "switch": switch("a", "q", yes=INSIDE),
    "loop": loop("a", {"v": "q"}, INSIDE),
}
PROMPT = {"id": "a", "op": "llm", "prompt": "Say: {{q}}"}
SCALARS = (None, True, False, 0, 1, 1.0, -1, 0.5, 3, 99, 10_001, 2**70, "", "q", "a b", "none", "left", "stop")
LISTS = ([], ["q"], [0], [0, None], [1, 2, 3], [None], [{"role": "user", "content": ""}], [{"chat": "q"}])
OBJECTS = ({}, {"v": "q"}, {"a b": "q"}, {"v": 1}, {"type": "object"}, INSIDE, {"x": INSIDE})
VALUES: list[Any] = [*SCALARS, *LISTS, *OBJECTS]


def is_read(raw: Any) -> bool:
    try:
        graph_from_dict(copy.deepcopy(raw))
    except InvalidGraph:
        return False
    return True


def test_it_is_a_schema_and_describes_fields() -> None:
    Draft202012Validator.check_schema(graph_schema())
    defs = graph_schema()["$defs"]
    assert defs["MapNode"]["properties"]["body"] == {"$ref": "#/$defs/Body"}
    assert defs["LoopNode"]["properties"]["max_rounds"]["default"] == 16
    assert "temperature" in defs["LlmNode"]["properties"]
    assert all(defs[kind.__name__]["additionalProperties"] is False for kind in NODES.values())
    assert all(defs[kind.__name__]["description"] for kind in NODES.values())


def test_graphs_are_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text(encoding="utf-8")
    [documented] = re.findall(r"```json\n(.*?)```", page, re.S)
    raws = [json.loads(json.dumps(flow.to_dict())) for flow in FLOWS.values()] + [json.loads(documented)]
    raws += [graph(node) for node in [*EVERY_OP.values(), PROMPT]]
    for raw in raws:
        SCHEMA.validate(raw)
        assert is_read(raw)


@given(graphs())
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_graphs_are_accepted(raw: Json) -> None:
    SCHEMA.validate(raw)
    SCHEMA.validate(json.loads(json.dumps(graph_to_dict(graph_from_dict(raw)))))


def without(raw: Json, name: str) -> Json:
    return {key: value for key, value in raw.items() if key != name}


def refused() -> Iterator[Any]:
    whole = graph(text("a"))
    yield from ([], None, {**whole, "extra": None})
    yield from ({**whole, "version": version} for version in (0, 2, "1", True, None))
    yield from (without(whole, name) for name in ("version", "nodes", "outputs"))
    yield from (
        {**whole, **change} for change in ({"inputs": None}, {"inputs": ["a b"]}, {"outputs": {}}, {"nodes": {}})
    )
    for op, node in EVERY_OP.items():
        yield from (graph(without(node, name), outputs={"o": "q"}) for name in node if name != "args")
        yield from (graph({**node, "extra": value}) for value in (1, None))
        yield from (graph({**node, **change}) for change in ({"id": "a b"}, {"id": 1}, {"op": "other"}, {"op": None}))
        for inner in ("body", "default"):
            if inner in NODES[op].__struct_fields__:
                yield graph({**node, inner: {**INSIDE, "extra": 1}})
                yield graph({**node, inner: body({**text("x"), "extra": 1}, v="x")})
    yield from (graph(llm("a", **change)) for change in ({"n": 2}, {"temperature": 11}, {"top_p": "x"}, {"audio": {}}))
    yield from (
        graph(llm("a", **change)) for change in ({"prompt": "x"}, {"request": {}}, {"truncate_prompt_tokens": 0})
    )
    yield graph({**llm("a"), "messages": [{"role": "user", "content": "", "tool_calls": None}]})


@pytest.mark.parametrize("raw", list(refused()))
def test_mistakes_are_refused_by_schema_and_reader(raw: Any) -> None:
    assert not SCHEMA.is_valid(raw)
    assert not is_read(raw)


@pytest.mark.parametrize("node", [*EVERY_OP.values(), PROMPT], ids=[*EVERY_OP, "prompt"])
def test_no_value_of_a_field_that_is_read_is_refused(node: Json) -> None:
    names = {*NODES[node["op"]].__struct_fields__, "op", "ONE_OF", *(CALL_FIELDS if node["op"] == "llm" else ())}
    for name in sorted(names):
        for value in VALUES:
            raw = {**node, name: value}
            assert SCHEMA.is_valid(graph(raw)) or not is_read(graph(raw)), raw


def parts(raw: Any) -> Iterator[Any]:
    """The objects and lists in a value, itself included."""
    if isinstance(raw, (dict, list)):
        yield raw
        for inner in raw.values() if isinstance(raw, dict) else raw:
            yield from parts(inner)


FIELDS = sorted(
    {"version", "inputs", "nodes", "outputs", "op", "role", "content", "chat", "extra", "temperature", "seed"}.union(
        *(kind.__struct_fields__ for kind in NODES.values())
    )
)


@st.composite
def mutated(draw: st.DrawFn) -> Json:
    """A graph with a few changes anywhere."""
    raw = copy.deepcopy(draw(graphs(max_nodes=3)))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(list(parts(raw))))
        removes, value = draw(st.booleans()), copy.deepcopy(draw(st.sampled_from(VALUES)))
        if isinstance(place, dict):
            key = draw(st.sampled_from([*place, *FIELDS]))
            if removes:
                place.pop(key, None)
            else:
                place[key] = value
        else:
            at = draw(st.integers(0, len(place)))
            place[at : at + removes] = [] if removes else [value]
    return raw


@given(mutated())
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_what_the_schema_refuses_the_reader_refuses(raw: Json) -> None:
    assert SCHEMA.is_valid(raw) or not is_read(raw)
