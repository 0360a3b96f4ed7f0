"""Usage of groups of calls, against the calls one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.schedules.problems import problem_of
from bench.schedules.shapes import SHAPES, instance
from tests.workflow.planner.analysed import KV_TOKENS, analysed, costing_of, words
from tests.workflow.shapes import body, function, graph, llm, mapped, pick
from weft.workflow.planner.cost import decode_usage
from weft.workflow.planner.groups import OperatorGroup, Order, schedule_problem


@pytest.mark.parametrize("order", ["rows", "nodes"])
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_a_group_uses_what_its_calls_use(seed: int, order: Order) -> None:
    made = problem_of(instance(seed, 12))
    costing = costing_of(made.analysed)
    group = OperatorGroup((0, 1), (0, made.analysed.prompts.num_rows), order=order)
    numbers = made.numbers(group.calls())
    alone = [made.problem.groups[number].usage for number in numbers]
    saved = [made.problem.savings[a][b] for a, b in itertools.pairwise(numbers)]
    usage, first, last = costing.group(group)
    assert usage == sum(alone) - sum(saved)
    of_first, of_last = (alone[:2], alone[-2:]) if order == "rows" else (alone[:1], alone[-1:])
    behind = (saved[0], saved[-1]) if order == "rows" else (0, 0)
    assert (first, last) == (sum(of_first) - behind[0], sum(of_last) - behind[1])


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_single_calls_are_the_problem_of_the_definition(seed: int) -> None:
    made = problem_of(instance(seed, 12))
    groups = [OperatorGroup((operator,), (row, row + 1)) for operator, row in made.calls]
    problem = schedule_problem(groups, costing_of(made.analysed))
    assert problem.groups == made.problem.groups
    assert problem.savings == made.problem.savings


def test_the_cheaper_order_is_chosen() -> None:
    shared_by_row = graph(llm("a", "{{q}} one"), llm("b", "{{q}} two"), outputs={"a": "a", "b": "b"})
    shared_by_node = graph(llm("a", words(50, "a")), llm("b", words(50, "b")), outputs={"a": "a", "b": "b"})
    rows = [{"q": words(40, f"r{row}_")} for row in range(5)]
    for raw, order in ((shared_by_row, "rows"), (shared_by_node, "nodes")):
        assert costing_of(analysed(raw, rows)).best_order(OperatorGroup((0, 1), (0, 5))).order == order


def test_items_of_a_map_share_what_is_before_them() -> None:
    raw: dict[str, Any] = graph(
        pick("parts", "q", split=";"),
        mapped("each", "parts", body(llm("note", f"{words(30)} {{{{i}}}}"), value="note")),
        function("end", "join", of="{{each}}"),
    )
    statistics = {"each": {"items": 4}, "each.i": {"output_tokens": 10}, "each.note": {"output_tokens": 6}}
    work = analysed(raw, 1, statistics)
    # `<user>`, 30 words, the item, `<end>` and `<assistant>`
    first, later = 6 * (1 + 30 + 10 + 2) + decode_usage(6), 6 * (10 + 2) + decode_usage(6)
    assert costing_of(work).group(OperatorGroup((0,), (0, 1)))[0] == first + 3 * later


def test_engines_with_more_memory_take_fewer_steps() -> None:
    work = analysed(graph(llm("a", "{{q}}")), 4)
    costing = costing_of(work, KV_TOKENS, KV_TOKENS // 4)
    small, large = (costing.group(OperatorGroup((0,), (0, 4), engine))[0] for engine in (1, 0))
    assert small == 4 * large
    assert costing.delay(0) == KV_TOKENS * work.unrolled.operators[0].output_tokens
