"""Runs in the order of plans: calls leave in it, results are those of naive evaluation."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.planner.analysed import scheduled, words
from tests.workflow.random_graphs import graphs
from tests.workflow.run.player import Player
from tests.workflow.run.test_state import naive
from tests.workflow.shapes import Json, graph, llm
from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.analyse import analyse
from weft.workflow.graph import canonical, graph_from_dict
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.plan import Plan, make_plan
from weft.workflow.run.order import CallSite, row_by_row
from weft.workflow.run.planned_order import PlannedOrder, is_plan_due

ROWS = [{"question": f"What {row}?", "document": "One. Two. Three."} for row in range(3)]


def plan_of(raw: Json, rows: list[Json], **statistics: Any) -> Plan:
    tokens = WordTokens()
    analysed = analyse(canonical(graph_from_dict(raw)), rows, "m", statistics, lambda model: tokens)
    return make_plan(analysed, [PlanEngine("m", 500)])


def planned_order(raw: Json, rows: list[Json], **statistics: Any) -> PlannedOrder:
    order = PlannedOrder(row_by_row(graph_from_dict(raw)))
    order.put({row: row for row in range(len(rows))}, plan_of(raw, rows, **statistics).ranks(), range(len(rows)))
    return order


def sent_one_by_one(raw: Json, rows: list[Json], order: PlannedOrder) -> Player:
    """Each call is answered before the next one is sent, and everything else as soon as it can be."""
    player = Player(graph_from_dict(raw), [], order=order)
    for row, values in enumerate(rows):
        player.state.open_row(row, values)
    while player.state.num_rows or player.state.has_instructions:
        player._take(player.state.take(0))
        if not player.open:
            player._take(player.state.take(1))
        while player.open:
            player._step(player.open.pop())
    return player


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_calls_of_any_graph_leave_in_the_order_of_the_plan(raw: Json) -> None:
    order = planned_order(raw, ROWS)
    asked: list[tuple[Any, ...]] = []
    player = sent_one_by_one(raw, ROWS, order)
    for call in player.sent:
        asked.append(order(player.sites[call.task]))
    assert asked == sorted(asked)


def test_all_calls_leave_in_the_order_of_the_plan() -> None:
    raw = graph(
        *(llm(name, f"{words(40, name)} {{{{q}}}} {name}") for name in ("a", "b", "c")),
        llm("d", f"{words(40, 'b')} {{{{a}}}} {{{{c}}}} d"),
        outputs={name: name for name in "bd"},
    )
    rows = [{"q": f"{words(30)} {row}"} for row in range(6)]
    player = sent_one_by_one(raw, rows, planned_order(raw, rows))
    sent = [(player.sites[call.task].label, call.task.row) for call in player.sent]
    assert sent == [(call.label, call.row) for call in scheduled(plan_of(raw, rows))]
    assert sent != sorted(sent, key=lambda call: call[1])


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 2**32))
def test_results_are_those_of_naive_evaluation(raw: Json, seed: int) -> None:
    done = Player(graph_from_dict(raw), ROWS, seed=seed, order=planned_order(raw, ROWS[:2])).play()
    for row, ended in zip(ROWS, done, strict=True):
        expected = naive(raw, row)
        if expected is not None:
            assert ended.failure is None
            assert ended.outputs == expected


class Fixed:
    """Ranks by row alone."""

    def rank(self, label: str, rounds: tuple[int, ...], row: int) -> int:
        return row


def test_rows_of_earlier_plans_come_first_and_those_of_none_last() -> None:
    order = PlannedOrder(lambda site: (-site.row,))
    order.put({5: 1, 6: 0, 7: 2}, Fixed(), {5, 6, 7})
    order.put({7: 1, 1: 0, 2: 2}, Fixed(), {1, 2, 3, 4, 5, 6, 7})
    assert sorted(range(1, 8), key=lambda row: order(CallSite(row, "a"))) == [6, 5, 1, 7, 2, 4, 3]
    order.put({}, Fixed(), {5})
    assert [row for row in range(8) if row in order] == [5]


def test_late_rows_make_a_plan_due_when_they_are_many_or_the_last() -> None:
    assert not is_plan_due(0, 10, is_open=False)
    assert not is_plan_due(2, 10, is_open=True)
    assert is_plan_due(3, 10, is_open=True)
    assert is_plan_due(1, 10, is_open=False)
