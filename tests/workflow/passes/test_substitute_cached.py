from __future__ import annotations

from typing import Any

import pytest

from tests.workflow.naive import fake_text
from tests.workflow.passes.fixtures import leaves, rewrites
from tests.workflow.shapes import Json, body, graph, llm, loop, mapped, text
from weft.workflow.graph import graph_from_dict
from weft.workflow.passes import CachedResult, OperatorCall, optimise, substitute_cached

MORE = {"role": "user", "content": "More, {{q}}."}


def knows_all(call: OperatorCall) -> CachedResult:
    """A cache with the answers that the fakes give."""
    if call.op == "llm":
        return CachedResult(fake_text(call.fields))
    return CachedResult(fake_text([None, call.fields["source"], call.fields["args"]]))


def call(node_id: str, content: str = "Hi \\{{q}}", **fields: Any) -> Json:
    return llm(node_id, content, temperature=0, **fields)


def answer(content: str = "Hi {{q}}", **fields: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return fake_text({"temperature": 0, "messages": messages, "schema": None, **fields})


def data(node_id: str, value: Any) -> Json:
    return {"id": node_id, "op": "data", "value": value}


T = text("t", "{{a}} {{q}}")


def cached(before: Json, after: Json, *removed: str) -> None:
    rewrites(substitute_cached, before, after, removed=removed, lookup=knows_all)


def test_a_known_answer_is_a_constant() -> None:
    cached(graph(call("a"), T), graph(data("a", answer()), T), "a")


def test_the_cache_sees_every_field() -> None:
    asked: list[OperatorCall] = []
    given = graph(call("a", max_tokens=3, stop=["."], model="m", retries=1))
    assert substitute_cached(graph_from_dict(given), asked.append).removed == ()
    messages = [{"role": "user", "content": "Hi {{q}}"}]
    fields = {"temperature": 0, "max_tokens": 3, "stop": ["."], "model": "m", "messages": messages, "schema": None}
    assert asked == [OperatorCall(op="llm", fields=fields)]


@pytest.mark.parametrize(
    "node",
    [
        llm("a"),
        call("a", cache=False),
        call("a", "{{q}}"),
        call("a", tools=[{"type": "function", "function": {"name": "f"}}]),
        {"id": "a", "op": "program", "program": "p"},
        {"id": "a", "op": "function", "name": "f", "pure": True},
        {"id": "a", "op": "function", "source": "f"},
        {"id": "a", "op": "external"},
    ],
)
def test_what_no_cache_may_answer(node: Json) -> None:
    leaves(substitute_cached, graph(node, T), lookup=knows_all)


def test_a_pure_function_given_as_source() -> None:
    node = {"id": "a", "op": "function", "source": "f", "args": {"x": 1}, "pure": True}
    cached(graph(node, T), graph(data("a", fake_text([None, "f", {"x": 1}])), T), "a")


def test_what_follows_constants_is_asked_for_next() -> None:
    second = answer(f"{answer()}!")
    before = graph(call("a"), call("b", "{{a}}!"), text("t", "{{b}} {{q}}"))
    cached(
        before,
        graph(data("a", answer()), data("b", second), text("t", "{{b}} {{q}}"), outputs={"out": "t"})
        | {"nodes": [data("b", second), text("t", "{{b}} {{q}}"), data("a", answer())]},
        "a",
        "b",
    )


def test_a_conversation_goes_on_as_text() -> None:
    go_on: Json = {"id": "b", "op": "llm", "messages": [{"chat": "a"}, MORE]}
    said = [{"role": "user", "content": "Hi \\{{q}}"}, {"role": "assistant", "content": answer()}]
    after = graph({**go_on, "messages": [*said, MORE]}, outputs={"out": "b", "a": "a"})
    cached(
        graph(call("a"), go_on, outputs={"out": "b", "a": "a"}),
        {**after, "nodes": [data("a", answer()), *after["nodes"]]},
        "a",
    )


@pytest.mark.parametrize("through", ["list", "loop"])
def test_an_answer_whose_conversation_goes_on_elsewhere_stays_one(through: str) -> None:
    def go_on(name: str) -> Json:
        return {"id": "b", "op": "llm", "messages": [{"chat": name}, MORE]}

    items = {"id": "items", "op": "list", "of": ["{{a}}"]}
    listed = graph(call("a"), items, mapped("m", "items", body(go_on("i"), v="b")))
    looped = graph(call("a"), loop("m", {"s": "a"}, body(go_on("s"), s="b"), max_rounds=2))
    leaves(substitute_cached, listed if through == "list" else looped, lookup=knows_all)


def test_an_answer_that_is_not_what_its_call_asks_for_is_not_taken() -> None:
    given = graph_from_dict(
        graph(call("a", schema={"type": "object"}), text("t", "{{q}}"), outputs={"o": "t", "a": "a"})
    )
    assert substitute_cached(given, lambda call: CachedResult("no JSON")).graph == given
    made = substitute_cached(given, lambda call: CachedResult('{"x": 1}')).graph
    assert [node.value for node in made.nodes if node.op == "data"] == [{"x": 1}]  # type: ignore[union-attr]


def test_all_passes_reach_what_a_cached_text_makes_constant() -> None:
    before = graph(call("a"), text("t", "{{a}}!"), call("b", "{{t}}"), text("u", "{{b}} {{q}}"))
    made = optimise(graph_from_dict(before), knows_all)
    assert [node.op for node in made.graph.nodes] == ["text"]
    assert [(each.name, each.removed) for each in made.reports if each.removed] == [
        ("substitute_cached", ("a", "b")),
        ("fold_constants", ("t",)),
    ]
