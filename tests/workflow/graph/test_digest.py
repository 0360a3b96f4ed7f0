from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.random_graphs import graphs
from tests.workflow.shapes import body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import Reference, WorkflowGraph, canonical, digest, graph_from_dict, graph_to_dict
from weft.workflow.graph.digest import journal_digest, node_digest
from weft.workflow.graph.nodes import map_strings
from weft.workflow.graph.templates import Template, parse_template


def node_digests(graph: WorkflowGraph) -> dict[str, str]:
    """By id, a digest of each outer node with all that it depends on. The graph is canonical."""
    known: dict[str, str] = {}

    def name(reference: Reference) -> Reference:
        return reference._replace(name=known.get(reference.name, reference.name))

    for node in graph.nodes:
        known[node.id] = node_digest(node, name)
    return known


def renamed(value: Any, names: dict[str, str]) -> Any:
    """The same graph with other ids: every string that is an id, and every reference to one."""

    def replaced(value: str) -> str:
        name, dot, path = value.partition(".")
        if name in names:
            return names[name] + dot + path
        parts = parse_template(value).parts
        new = [part if isinstance(part, str) else part._replace(name=names.get(*[part.name] * 2)) for part in parts]
        return str(Template(tuple(new)))

    return map_strings(value, replaced)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same graph with the nodes of each body in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(inner, rng)) for key, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        inner = [shuffled(each, rng) for each in value]
        if inner and isinstance(inner[0], dict) and "op" in inner[0]:
            rng.shuffle(inner)
        return inner
    return value


def ids(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["id"]] if "op" in value else []
        own += [value["item"]] if "item" in value else []
        return own + [each for inner in value.values() for each in ids(inner)]
    return [each for inner in value for each in ids(inner)] if isinstance(value, list) else []


@settings(deadline=None, max_examples=60)
@given(graphs(), st.randoms(use_true_random=False))
def test_ids_and_order_make_no_difference(raw: dict[str, Any], rng: random.Random) -> None:
    before = graph_from_dict(raw)
    names = {name: f"other{number}" for number, name in enumerate(ids(raw))}
    again = graph_from_dict(shuffled(renamed(raw, names), rng))
    assert digest(again) == digest(before)
    assert journal_digest(again) != journal_digest(before)
    assert journal_digest(graph_from_dict(shuffled(raw, rng))) == journal_digest(before)
    assert list(node_digests(again).values()) == list(node_digests(before).values())


@settings(deadline=None, max_examples=60)
@given(graphs())
def test_json_and_back(raw: dict[str, Any]) -> None:
    made = graph_from_dict(raw)
    assert canonical(made) == made
    assert graph_from_dict(graph_to_dict(made)) == made


SAME = graph(llm("a", "{{q}}", max_tokens=3), text("b", "{{a}}!"), text("dead", "{{b}}"), outputs={"x": "b"})


@pytest.mark.parametrize(
    "other",
    [
        graph(llm("a", "{{q}}", max_tokens=4), text("b", "{{a}}!"), text("dead", "{{b}}"), outputs={"x": "b"}),
        graph(llm("a", "{{q}} ", max_tokens=3), text("b", "{{a}}!"), text("dead", "{{b}}"), outputs={"x": "b"}),
        graph(llm("a", "q", max_tokens=3), text("b", "{{a}}!"), text("dead", "{{b}}"), outputs={"x": "b"}),
        graph(llm("a", "{{q}}", max_tokens=3), text("b", "{{a}}!"), outputs={"x": "b"}),
        graph(llm("a", "{{q}}", max_tokens=3), text("b", "{{a}}!"), text("dead", "{{b}}"), outputs={"y": "b"}),
        graph(llm("a", "{{q}}", max_tokens=3), text("b", "{{a}}!"), text("dead", "{{b}}"), outputs={"x": "a"}),
        graph(llm("a", "{{q}}", max_tokens=3), text("b", "{{a}}!"), text("dead", "{{a}}"), outputs={"x": "b"}),
        {**SAME, "inputs": ["q", "r"]},
    ],
)
def test_what_makes_a_difference(other: dict[str, Any]) -> None:
    assert digest(graph_from_dict(other)) != digest(graph_from_dict(SAME))
    assert journal_digest(graph_from_dict(other)) != journal_digest(graph_from_dict(SAME))


@pytest.mark.parametrize("field", ["args", "of"])
def test_empty_values_are_not_equal(field: str) -> None:
    def made(value: Any) -> dict[str, Any]:
        node = function("a", "f", x=value) if field == "args" else {"id": "a", "op": "list", "of": [value]}
        return graph(node, outputs={"x": "a"})

    values = ["", [], [""], [[]], [[""]], {}, {"x": ""}, {"x": []}, None]
    assert len({digest(graph_from_dict(made(value))) for value in values}) == len(values)


def test_null_is_a_constant() -> None:
    made = graph_from_dict(graph({"id": "a", "op": "data", "value": None}))
    assert graph_from_dict(graph_to_dict(made)) == made


def test_the_order_of_outputs_makes_no_difference() -> None:
    def whole(**outputs: str) -> dict[str, Any]:
        return graph(text("a", "1"), text("b", "2"), switch("s", "q", x=body(**outputs)), outputs={"o": "s.v"})

    assert digest(graph_from_dict(whole(v="a", w="b"))) == digest(graph_from_dict(whole(w="b", v="a")))


def test_what_ends_a_loop_is_before_it() -> None:
    ended = loop("l", {"s": "q"}, body(s="s"), until="ok")
    assert [node.id for node in graph_from_dict(graph(pick("ok", "q", matches="x"), ended)).nodes] == ["ok", "l"]


def test_ids_within_bodies_make_a_difference_to_journals() -> None:
    def whole(first: str, second: str) -> WorkflowGraph:
        inside = body(
            llm(first, "1 {{s}}"), llm(second, "2 {{s}}"), text("t", f"{{{{{first}}}}}{{{{{second}}}}}"), s="t"
        )
        return graph_from_dict(graph(loop("l", {"s": "q"}, inside, max_rounds=2)))

    assert digest(whole("a", "b")) == digest(whole("b", "a"))
    assert journal_digest(whole("a", "b")) != journal_digest(whole("b", "a"))


def test_two_calls_that_are_alike_are_not_one() -> None:
    two = graph(llm("a"), llm("b"), text("c", "{{a}} {{b}}"))
    one = graph(llm("a"), text("c", "{{a}} {{a}}"))
    assert digest(graph_from_dict(two)) != digest(graph_from_dict(one))
    by_node = node_digests(graph_from_dict(two))
    assert by_node["a"] == by_node["b"] != by_node["c"]


def test_a_reference_to_the_only_output_may_leave_it_out() -> None:
    def joined(reference: str) -> dict[str, Any]:
        items = {"id": "items", "op": "list", "of": ["{{q}}"]}
        return graph(items, mapped("each", "items", body(v="i")), function("o", "join", of=f"{{{{{reference}}}}}"))

    assert graph_from_dict(joined("each")) == graph_from_dict(joined("each.v"))
