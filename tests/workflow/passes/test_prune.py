from __future__ import annotations

import pytest

from tests.workflow.naive import NaiveRunner
from tests.workflow.passes.fixtures import leaves, rewrites
from tests.workflow.shapes import Json, body, graph, llm, loop, mapped, pick, switch, text
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.values import RowError
from weft.workflow.passes import prune

PARTS = pick("parts", "q", split=", ")
OUT = {"out": "t"}


@pytest.mark.parametrize(
    "dead",
    [
        llm("dead", "{{q}}"),
        text("dead", "{{t}}"),
        {"id": "dead", "op": "program", "program": "agent"},
        {"id": "dead", "op": "external"},
        {"id": "dead", "op": "function", "name": "f", "args": {"x": "{{t}}"}},
    ],
)
def test_what_no_output_needs_goes(dead: Json) -> None:
    needless = graph(text("t", "{{q}}"), dead, outputs=OUT)
    rewrites(prune, needless, graph(text("t", "{{q}}"), outputs=OUT), removed=["dead"])


def test_what_only_that_needed_goes_too() -> None:
    before = graph(text("t", "{{q}}"), llm("a"), llm("b", "{{a}} {{t}}"), llm("c", "{{b}}"), outputs=OUT)
    rewrites(prune, before, graph(text("t", "{{q}}"), outputs=OUT), removed=["a", "b", "c"])


def test_what_a_body_needs_stays() -> None:
    leaves(prune, graph(PARTS, llm("a"), mapped("m", "parts", body(text("x", "{{i}} {{a}}"), v="x"))))


def test_an_unused_output_of_a_map_goes_with_its_nodes() -> None:
    inside = body(llm("a", "{{i}}"), llm("b", "{{a}}"), llm("c", "{{outer}}"), v="a", w="b", u="c")
    before = graph(PARTS, llm("outer"), mapped("m", "parts", inside), outputs={"out": "m.v"})
    after = graph(PARTS, mapped("m", "parts", body(llm("a", "{{i}}"), v="a")), outputs={"out": "m.v"})
    rewrites(prune, before, after, removed=["outer", "c", "b"])


def test_an_unused_output_of_a_switch_goes_in_every_case() -> None:
    cases = {name: body(llm(f"a{name}"), llm(f"b{name}"), v=f"a{name}", w=f"b{name}") for name in ("x", "y")}
    fewer = {name: body(llm(f"a{name}"), v=f"a{name}") for name in ("x", "y")}
    default = {"default": body(v="q")}
    before = graph({**switch("s", "q", **cases), "default": body(v="q", w="q")}, outputs={"out": "s.v"})
    after = graph({**switch("s", "q", **fewer), **default}, outputs={"out": "s.v"})
    rewrites(prune, before, after, removed=["bx", "by"])


def test_bodies_in_bodies() -> None:
    inner = mapped("n", "parts", body(llm("a", "{{i}}"), llm("b", "{{i}}"), v="a", w="b"))
    less = mapped("n", "parts", body(llm("a", "{{i}}"), v="a")) | {"item": "j"}
    less["body"] = body(llm("a", "{{j}}"), v="a")
    inner = {**inner, "item": "j", "body": body(llm("a", "{{j}}"), llm("b", "{{j}}"), v="a", w="b")}
    before = graph(PARTS, mapped("m", "parts", body(inner, llm("c"), v="n.v", w="c")), outputs={"out": "m.v"})
    after = graph(PARTS, mapped("m", "parts", body(less, v="n.v")), outputs={"out": "m.v"})
    rewrites(prune, before, after, removed=["b", "c"])


def test_a_state_that_nothing_needs_leaves_the_loop() -> None:
    both = body(llm("a", "{{s}}"), llm("b", "{{r}}"), s="a", r="b")
    before = graph(llm("first"), loop("l", {"s": "q", "r": "first"}, both, max_rounds=2), outputs={"out": "l.s"})
    after = graph(loop("l", {"s": "q"}, body(llm("a", "{{s}}"), s="a"), max_rounds=2), outputs={"out": "l.s"})
    rewrites(prune, before, after, removed=["first", "b"])


def test_a_state_that_a_later_round_needs_stays() -> None:
    crossed = body(llm("a", "{{r}}"), llm("b", "{{s}}"), s="a", r="b")
    leaves(prune, graph(loop("l", {"s": "q", "r": "q"}, crossed, max_rounds=3), outputs={"out": "l.s"}))


@pytest.mark.parametrize("until", ["ok", "r"])
def test_a_state_that_ends_the_loop_stays(until: str) -> None:
    inside = body(llm("a", "{{s}}"), text("more", "{{n}}!"), pick("ok", "more", matches="!!"), s="a", n="more", r="ok")
    start = pick("no", "q", matches="never")
    raw = graph(start, loop("l", {"s": "q", "n": "q", "r": "no"}, inside, until=until), outputs={"out": "l.s"})
    states = {"s": "q", "n": "q"} if until == "ok" else {"s": "q", "n": "q", "r": "no"}
    kept = {**inside, "outputs": {name: inside["outputs"][name] for name in states}}
    after = graph(*([] if until == "ok" else [start]), loop("l", states, kept, until=until), outputs={"out": "l.s"})
    rewrites(prune, raw, after, removed=["no"] if until == "ok" else [])


def test_what_ends_a_loop_may_stand_around_it() -> None:
    ending = pick("ok", "q", matches="")
    leaves(prune, graph(ending, loop("l", {"s": "q"}, body(llm("a", "{{s}}"), s="a"), until="ok")))


def test_an_error_of_what_nothing_needs_vanishes() -> None:
    failing = graph_from_dict(graph(text("t", "{{q}}"), pick("dead", "q", regex="none"), outputs=OUT))
    with pytest.raises(RowError):
        NaiveRunner().run(failing, {"q": "x"})
    assert NaiveRunner().run(prune(failing).graph, {"q": "x"}) == {"out": "x"}
