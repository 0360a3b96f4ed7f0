from __future__ import annotations

from typing import Any

import pytest

from tests.workflow.passes.fixtures import leaves, rewrites
from tests.workflow.shapes import Json, body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.passes import merge_duplicates

PARTS = pick("parts", "q", split=", ")
BOTH = text("t", "{{a}}|{{b}}")
ONE = text("t", "{{a}}|{{a}}")


def call(node_id: str, content: str = "{{q}}", **fields: Any) -> Json:
    return llm(node_id, content, temperature=0, **fields)


def pair(**node: Any) -> list[Json]:
    return [{"id": "a", **node}, {"id": "b", **node}]


MESSAGES = [{"role": "user", "content": "{{q}}"}]
PURE = {"op": "function", "name": "f", "args": {"x": "{{q}}"}, "pure": True}


@pytest.mark.parametrize(
    "twins",
    [
        pair(op="llm", messages=MESSAGES, temperature=0),
        pair(op="llm", messages=MESSAGES, temperature=0.0, max_tokens=3),
        pair(op="llm", messages=MESSAGES, seed=0),
        pair(op="llm", messages=MESSAGES, temperature=0.7, seed=3),
        pair(op="llm", prompt="{{q}}", temperature=0, stop=["."]),
        pair(**PURE),
        pair(op="text", template="{{ q }}!"),
        pair(op="data", value={"x": [1]}),
        pair(op="pick", of="q", strip=True),
    ],
)
def test_two_that_compute_the_same_are_one(twins: list[Json]) -> None:
    rewrites(merge_duplicates, graph(*twins, BOTH), graph(twins[0], ONE), merged=[["a", "b"]])


@pytest.mark.parametrize(
    "twins",
    [
        pair(op="llm", messages=MESSAGES),
        pair(op="llm", messages=MESSAGES, temperature=0.7),
        pair(op="llm", messages=MESSAGES, temperature=0, cache=False),
        [call("a", seed=1), call("b", seed=2)],
        [call("a", max_tokens=1), call("b", max_tokens=2)],
        [call("a", retries=1), call("b")],
        [call("a", model="m"), call("b")],
        pair(op="program", program="agent"),
        pair(**{**PURE, "pure": False}),
        pair(op="external"),
        [{"id": "a", "op": "data", "value": 1}, {"id": "b", "op": "data", "value": 1.0}],
        [{"id": "a", "op": "data", "value": True}, {"id": "b", "op": "data", "value": 1}],
    ],
)
def test_what_may_differ_stays_two(twins: list[Json]) -> None:
    leaves(merge_duplicates, graph(*twins, BOTH))


def test_merging_goes_on_to_a_fixpoint() -> None:
    before = graph(call("a"), call("b"), call("c", "{{a}}"), call("d", "{{b}}"), text("t", "{{c}}{{d}}"))
    after = graph(call("a"), call("c", "{{a}}"), text("t", "{{c}}{{c}}"))
    rewrites(merge_duplicates, before, after, merged=[["a", "b"], ["c", "d"]])


def test_what_follows_two_different_calls_stays_two() -> None:
    leaves(merge_duplicates, graph(llm("a"), llm("b"), call("c", "{{a}}"), call("d", "{{b}}"), text("t", "{{c}}{{d}}")))


def test_a_conversation_goes_on_from_the_one_that_is_kept() -> None:
    more: Json = {"id": "m", "op": "llm", "messages": [{"chat": "b"}, {"role": "user", "content": "{{a}}"}]}
    kept = {**more, "messages": [{"chat": "a"}, more["messages"][1]]}
    outputs = {"a": "a", "more": "m"}
    before, after = graph(call("a"), call("b"), more, outputs=outputs), graph(call("a"), kept, outputs=outputs)
    rewrites(merge_duplicates, before, after, merged=[["a", "b"]])


def test_within_a_body() -> None:
    before = body(call("a", "{{i}}"), call("b", "{{i}}"), BOTH, v="t")
    after = body(call("a", "{{i}}"), ONE, v="t")
    rewrites(
        merge_duplicates,
        graph(PARTS, mapped("m", "parts", before)),
        graph(PARTS, mapped("m", "parts", after)),
        merged=[["a", "b"]],
    )


def test_two_maps_with_equal_bodies_are_one() -> None:
    def each(node_id: str, item: str) -> Json:
        inside = body(call(f"{node_id}_call", f"{{{{{item}}}}}"), v=f"{node_id}_call")
        return mapped(node_id, "parts", inside) | {"item": item}

    ends = function("j", "join", of="{{m}}"), function("k", "join", of="{{n}}")
    before = graph(PARTS, each("m", "x"), each("n", "y"), *ends, text("t", "{{j}}{{k}}"))
    after = graph(PARTS, each("m", "x"), ends[0], text("t", "{{j}}{{j}}"))
    rewrites(merge_duplicates, before, after, removed=["n_call"], merged=[["m", "n"], ["j", "k"]])


@pytest.mark.parametrize("fields", [{}, {"temperature": 0, "cache": False}])
def test_two_maps_that_do_not_merge_inside_stay_two(fields: Json) -> None:
    def each(name: str) -> Json:
        inside = body(llm(f"{name}_call", f"{{{{{name}_item}}}}", **fields), v=f"{name}_call")
        return mapped(name, "parts", inside) | {"item": f"{name}_item"}

    leaves(merge_duplicates, graph(PARTS, each("m"), each("n"), outputs={"m": "m.v", "n": "n.v"}))


def test_a_node_in_a_body_merges_with_one_around_it() -> None:
    inside = body(call("b"), text("t", "{{b}} {{i}} {{a}}"), v="t")
    after = body(text("t", "{{a}} {{i}} {{a}}"), v="t")
    rewrites(
        merge_duplicates,
        graph(PARTS, mapped("m", "parts", inside), call("a"), outputs={"m": "m", "a": "a"}),
        graph(PARTS, mapped("m", "parts", after), call("a"), outputs={"m": "m", "a": "a"}),
        merged=[["a", "b"]],
    )


def test_an_output_of_a_body_may_be_what_merged() -> None:
    cases = switch("s", "q", x=body(call("b"), v="b")) | {"default": body(v="q")}
    after = switch("s", "q", x=body(v="a")) | {"default": body(v="q")}
    rewrites(
        merge_duplicates,
        graph(call("a"), cases, outputs={"s": "s", "a": "a"}),
        graph(call("a"), after, outputs={"s": "s", "a": "a"}),
        merged=[["a", "b"]],
    )


@pytest.mark.parametrize(
    "around",
    [
        lambda inside: mapped("m", "parts", inside),
        lambda inside: switch("m", "q", x=inside) | {"default": body(v="q")},
    ],
)
def test_nothing_leaves_what_may_not_be_evaluated(around: Any) -> None:
    leaves(merge_duplicates, graph(PARTS, around(body(call("a"), v="a")), outputs={"m": "m", "parts": "parts"}))


def test_cases_do_not_share() -> None:
    cases = switch("s", "q", x=body(call("a"), v="a")) | {"default": body(call("b"), v="b")}
    leaves(merge_duplicates, graph(cases))


def test_what_is_the_same_in_every_round_is_evaluated_once() -> None:
    inside = body(text("t", "{{q}}!"), call("a", "{{t}}"), llm("free", "{{t}}"), text("n", "{{s}}{{a}}{{free}}"), s="n")
    after = body(llm("free", "{{t}}"), text("n", "{{s}}{{a}}{{free}}"), s="n")
    rewrites(
        merge_duplicates,
        graph(loop("l", {"s": "q"}, inside, max_rounds=3)),
        graph(text("t", "{{q}}!"), call("a", "{{t}}"), loop("l", {"s": "q"}, after, max_rounds=3)),
        merged=[["t"], ["a"]],
    )


def test_what_a_round_may_not_ask_for_stays_in_its_loop() -> None:
    """The case that needs the call may never be taken."""
    cases = switch("w", "s", x=body(text("t", "{{a}}"), v="t")) | {"default": body(v="s")}
    leaves(merge_duplicates, graph(loop("l", {"s": "q"}, body(call("a"), cases, s="w"), max_rounds=3)))


def test_what_a_map_in_a_round_may_not_ask_for_stays_in_its_loop() -> None:
    cases = switch("w", "i", x=body(text("t", "{{a}}"), v="t")) | {"default": body(v="i")}
    inside = body(call("a"), mapped("m", "parts", body(cases, v="w")), function("j", "join", of="{{m}}"), s="j")
    leaves(merge_duplicates, graph(PARTS, loop("l", {"s": "q"}, inside, max_rounds=3)))


def test_what_leaves_a_loop_may_merge_there() -> None:
    inside = body(call("b"), text("n", "{{s}}{{b}}"), s="n")
    after = body(text("n", "{{s}}{{a}}"), s="n")
    rewrites(
        merge_duplicates,
        graph(call("a"), loop("l", {"s": "a"}, inside, max_rounds=3)),
        graph(call("a"), loop("l", {"s": "a"}, after, max_rounds=3)),
        merged=[["a", "b"]],
    )


def test_the_end_of_a_loop_may_be_what_merged() -> None:
    inside = body(llm("a", "{{s}}"), pick("x", "a", matches="x"), pick("y", "a", matches="x"), s="a")
    after = {**inside, "nodes": inside["nodes"][:2]}
    rewrites(
        merge_duplicates,
        graph(loop("l", {"s": "q"}, inside, until="x", at_limit="stop")),
        graph(loop("l", {"s": "q"}, after, until="x", at_limit="stop")),
        merged=[["x", "y"]],
    )


def test_equal_names_in_two_bodies_are_two_nodes() -> None:
    first = switch("s", "q", x=body(call("a"), v="a")) | {"default": body(call("a", "no"), v="a")}
    made = switch("s", "q", x=body(call("a"), v="a")) | {"default": body(call("a_2", "no"), v="a_2")}
    rewrites(merge_duplicates, graph(first), graph(made))
