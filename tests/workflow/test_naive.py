"""The oracle itself: what it calls, and which results it holds equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.workflow.naive import NaiveRunner, evaluate, fake_tokens, outcome
from tests.workflow.random_graphs import graphs
from tests.workflow.shapes import body, function, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.values import RowError

ROW = {"q": "x, y", "question": "x", "document": "y. x"}
USER = {"role": "user", "content": "More."}


def run(raw: dict[str, Any], **fakes: Any) -> dict[str, Any]:
    return evaluate(graph_from_dict(raw), ROW, **fakes)


@settings(deadline=None, max_examples=60)
@given(graphs())
def test_random_graphs_give_the_same_again(raw: dict[str, Any]) -> None:
    assert outcome(graph_from_dict(raw), ROW) == outcome(graph_from_dict(raw), ROW)


def test_one_call_is_not_two() -> None:
    one = graph_from_dict(graph(llm("a"), text("t", "{{a}} {{a}}")))
    two = graph_from_dict(graph(llm("a"), llm("b"), text("t", "{{a}} {{b}}")))
    assert outcome(one, ROW) != outcome(two, ROW) == outcome(two, ROW)


@pytest.mark.parametrize("fixed", [{"temperature": 0}, {"seed": 3}, {"temperature": 1, "seed": 0}])
def test_a_fixed_call_answers_the_same(fixed: dict[str, Any]) -> None:
    made = run(graph(llm("a", "{{q}}", **fixed), llm("b", "{{q}}", **fixed), text("t", "{{a}}={{b}}")))["out"]
    left, _, right = made.partition("=")
    assert left == right


def test_every_operator() -> None:
    more = {"id": "more", "op": "llm", "messages": [{"chat": "i"}, USER]}
    inside = body(llm("note", "{{i}} of {{q}}"), v="note")
    shout = body(text("next", "{{s}}!"), pick("ok", "next", matches="!!$"), s="next")
    raw = graph(
        pick("parts", "q", split=", "),
        mapped("notes", "parts", inside),
        mapped("longer", "notes", body(more, v="more")),
        function("joined", "join", of="{{longer}}", separator="|"),
        function("chunks", "split", text="a b c d", max_tokens=2),
        loop("count", {"s": "q"}, shout, until="ok"),
        switch("choice", "q", **{"x, y": body(text("t", "taken"), v="t"), "z": body(pick("e", "q", regex="z"), v="e")}),
        {"id": "run", "op": "program", "program": "agent", "args": {"task": ["{{q}}"]}},
        {"id": "ok", "op": "external"},
        {"id": "all", "op": "list", "of": ["{{chunks}}", "{{count}}", "{{choice}}", "{{run}}", "{{ok}}", "{{f}}"]},
        function("f", "measure", of="{{parts}}"),
        outputs={"all": "all", "joined": "joined"},
    )
    fakes: dict[str, Any] = {
        "externals": {"ok": True},
        "functions": {"measure": lambda of: len(of)},
        "programs": {"agent": lambda args: args["task"]},
        "model": lambda node, request: "/".join(message["content"] for message in request["messages"]),
    }
    made = run(raw, **fakes)
    assert made["all"] == [["a b ", "c d"], "x, y!!", "taken", ["x, y"], True, 2]
    assert made["joined"] == "x of x, y/x of x, y/More.|y of x, y/y of x, y/More."


def test_errors_of_a_row_name_their_node() -> None:
    with pytest.raises(RowError, match="p: 'z' is not found"):
        run(graph(pick("p", "q", regex="z"), text("t"), outputs={"out": "t"}))
    with pytest.raises(RowError, match="e: no value was set"):
        run(graph({"id": "e", "op": "external"}))


def test_calls_are_counted() -> None:
    runner = NaiveRunner()
    inside = body(llm("a", "{{i}}"), text("b", "{{a}}"), v="b")
    runner.run(graph_from_dict(graph(pick("parts", "q", split=", "), mapped("m", "parts", inside))), ROW)
    assert runner.calls == ["a", "a"]
    assert runner.evaluated == ["parts", "m", "a", "b", "a", "b"]


def test_fake_tokens_are_the_whole_text() -> None:
    assert "".join(fake_tokens(" a  b\nc ")) == " a  b\nc "
