from __future__ import annotations

import pytest

from tests.workflow.naive import NaiveRunner
from tests.workflow.passes.fixtures import leaves, rewrites
from tests.workflow.shapes import Json, body, function, graph, llm, mapped, pick, text
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.nodes import MAX_ITEMS
from weft.workflow.graph.values import RowError
from weft.workflow.passes import optimise, push_slices

PARTS = pick("parts", "q", split=", ")
EACH = mapped("m", "parts", body(llm("a", "{{i}}"), v="a"))
JOINED = function("t", "join", of="{{p}}")
OVER = {**EACH, "over": "m_over"}


def over(of: str, part: Json, max_items: int = MAX_ITEMS) -> Json:
    """The slice that a map is over in place of a list."""
    return pick("m_over", of, slice=part, max_items=max_items)


@pytest.mark.parametrize("part", [[0, 2], [1, None], [None, -1], [-2, None], [5, 9]])
def test_a_slice_of_a_map_maps_the_slice(part: Json) -> None:
    before = graph(PARTS, EACH, pick("p", "m", slice=part), JOINED)
    after = graph(PARTS, over("parts", part), OVER, function("t", "join", of="{{m.v}}"))
    rewrites(push_slices, before, after, removed=["p"])


def test_items_outside_the_slice_are_not_computed() -> None:
    before = graph_from_dict(graph(PARTS, EACH, pick("p", "m", slice=[0, 1])))
    runner = NaiveRunner()
    runner.run(push_slices(before).graph, {"q": "x, y, z"})
    assert runner.calls == ["a"]


@pytest.mark.parametrize("max_items", [2, 3, MAX_ITEMS])
@pytest.mark.parametrize("count", [-1, 0, 1])
@pytest.mark.parametrize("part", [[0, 1], [-2, None]])
def test_a_list_longer_than_max_items_stays_an_error(max_items: int, count: int, part: Json) -> None:
    short = mapped("m", "parts", body(text("a", "{{i}}!"), v="a")) | {"max_items": max_items}
    before = graph(PARTS, short, pick("p", "m", slice=part), JOINED)
    after = graph(
        PARTS, over("parts", part, max_items), {**short, "over": "m_over"}, function("t", "join", of="{{m.v}}")
    )
    rewrites(push_slices, before, after, removed=["p"])
    row = {"q": ", ".join("x" * (max_items + count))}
    made = graph_from_dict(before), graph_from_dict(after), optimise(graph_from_dict(before)).graph
    if count > 0:
        for one in made:
            with pytest.raises(RowError, match=f"the list has {max_items + 1:,} items, and max_items is {max_items:,}"):
                NaiveRunner().run(one, row)
    else:
        first, *others = (NaiveRunner().run(one, row) for one in made)
        assert others == [first, first]


def test_a_slice_with_a_lower_bound_stays_behind_a_map() -> None:
    """The inner map may make three items, of which the outer one takes two."""
    inner = EACH | {"max_items": 3}
    outer = mapped("n", "m", body(text("b", "{{j}}!"), v="b")) | {"item": "j", "max_items": 2}
    before = graph(PARTS, inner, outer, pick("p", "n", slice=[0, 1]))
    kept = pick("n_over", "m.v", slice=[0, 1], max_items=2)
    after = graph(PARTS, inner, kept, {**outer, "over": "n_over"}, outputs={"out": "n.v"})
    rewrites(push_slices, before, after, removed=["p"])


def test_equal_slices_of_two_outputs() -> None:
    both = mapped("m", "parts", body(llm("a", "{{i}}"), v="a", w="i"))
    picks = pick("p", "m.v", slice=[0, 1]), pick("r", "m.w", slice=[0, 1])
    before = graph(PARTS, both, *picks, outputs={"p": "p", "r": "r"})
    moved = {**both, "over": "m_over"}
    after = graph(PARTS, over("parts", [0, 1]), moved, outputs={"p": "m.v", "r": "m.w"})
    rewrites(push_slices, before, after, removed=["p", "r"])


def test_through_a_map_over_a_map() -> None:
    outer = mapped("n", "m", body(text("b", "{{j}}!"), v="b")) | {"item": "j"}
    before = graph(PARTS, EACH, outer, pick("p", "n", slice=[0, 1]))
    after = graph(PARTS, over("parts", [0, 1]), OVER, {**outer, "over": "m"}, outputs={"out": "n.v"})
    rewrites(push_slices, before, after, removed=["p"])


@pytest.mark.parametrize(
    "raw",
    [
        graph(PARTS, EACH, pick("p", "m", slice=[0, 1]), outputs={"p": "p", "m": "m"}),
        graph(PARTS, EACH, pick("p", "m", slice=[0, 1]), pick("r", "m", slice=[0, 2]), outputs={"p": "p", "r": "r"}),
        graph(
            PARTS, EACH, pick("p", "m", slice=[0, 1]), function("t", "join", of="{{m}}"), outputs={"p": "p", "t": "t"}
        ),
        graph(PARTS, EACH, pick("p", "m", field="0")),
        graph(PARTS, pick("p", "parts", slice=[0, 1])),
        graph(PARTS, EACH, pick("p", "m", slice=[0, 1], max_items=9)),
    ],
)
def test_what_else_needs_the_map_keeps_it_whole(raw: Json) -> None:
    leaves(push_slices, raw)
