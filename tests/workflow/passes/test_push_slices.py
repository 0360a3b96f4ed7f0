from __future__ import annotations

import pytest

from tests.workflow.naive import NaiveRunner
from tests.workflow.passes.fixtures import leaves, rewrites
from tests.workflow.shapes import Json, body, function, graph, llm, mapped, pick, text
from weft.workflow.graph import graph_from_dict
from weft.workflow.passes import push_slices

PARTS = pick("parts", "q", split=", ")
EACH = mapped("m", "parts", body(llm("a", "{{i}}"), v="a"))
JOINED = function("t", "join", of="{{p}}")
OVER = {**EACH, "over": "m_over"}


@pytest.mark.parametrize("part", [[0, 2], [1, None], [None, -1], [-2, None], [5, 9]])
def test_a_slice_of_a_map_maps_the_slice(part: Json) -> None:
    before = graph(PARTS, EACH, pick("p", "m", slice=part), JOINED)
    after = graph(PARTS, pick("m_over", "parts", slice=part), OVER, function("t", "join", of="{{m.v}}"))
    rewrites(push_slices, before, after, removed=["p"])


def test_items_outside_the_slice_are_not_computed() -> None:
    before = graph_from_dict(graph(PARTS, EACH, pick("p", "m", slice=[0, 1])))
    runner = NaiveRunner()
    runner.run(push_slices(before).graph, {"q": "x, y, z"})
    assert runner.calls == ["a"]


def test_equal_slices_of_two_outputs() -> None:
    both = mapped("m", "parts", body(llm("a", "{{i}}"), v="a", w="i"))
    picks = pick("p", "m.v", slice=[0, 1]), pick("r", "m.w", slice=[0, 1])
    before = graph(PARTS, both, *picks, outputs={"p": "p", "r": "r"})
    over = {**both, "over": "m_over"}
    after = graph(PARTS, pick("m_over", "parts", slice=[0, 1]), over, outputs={"p": "m.v", "r": "m.w"})
    rewrites(push_slices, before, after, removed=["p", "r"])


def test_through_a_map_over_a_map() -> None:
    outer = mapped("n", "m", body(text("b", "{{j}}!"), v="b")) | {"item": "j"}
    before = graph(PARTS, EACH, outer, pick("p", "n", slice=[0, 1]))
    after = graph(PARTS, pick("m_over", "parts", slice=[0, 1]), OVER, {**outer, "over": "m"}, outputs={"out": "n.v"})
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
    ],
)
def test_what_else_needs_the_map_keeps_it_whole(raw: Json) -> None:
    leaves(push_slices, raw)
