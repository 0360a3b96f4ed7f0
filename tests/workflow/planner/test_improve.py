"""Improvement finds the best of small problems, never makes an order worse, and takes a bounded number of steps."""

from __future__ import annotations

import pytest

from tests.workflow.planner.problems import possible_orders, random_problem
from weft.workflow.planner import improve as module
from weft.workflow.planner.cost import CallGroup, ScheduleProblem
from weft.workflow.planner.improve import improve


@pytest.mark.parametrize("seed", range(8))
def test_small_problems_are_solved(seed: int) -> None:
    problem = random_problem(seed, 6)
    orders = possible_orders(problem)
    best = min(problem.timing(order).makespan for order in orders)
    worst = max(orders, key=lambda order: problem.timing(order).makespan)
    assert problem.timing(improve(problem, [worst])).makespan <= 1.005 * best


@pytest.mark.parametrize("max_steps", [0, 50, 1000])
def test_it_is_never_worse_and_keeps_to_its_steps(max_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(1, 14)
    order = list(range(14))
    timed = 0
    score = module._Search._score

    def counted(self: module._Search, order: tuple[int, ...], most: int | None) -> tuple[int, int] | None:
        nonlocal timed
        timed += len(order)
        return score(self, order, most)

    monkeypatch.setattr(module._Search, "_score", counted)
    found = improve(problem, [order], max_steps=max_steps)
    assert problem.timing(found).makespan <= problem.timing(order).makespan
    # Each descent may end one order late.
    assert timed <= max_steps + 6 * len(order)


def test_groups_change_places_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of two calls each, of which the second row must come first as a whole."""
    monkeypatch.setattr(module, "_moves", lambda size: iter(()))
    monkeypatch.setattr(module, "_lists", lambda problem: [])
    monkeypatch.setattr(module, "SMALLEST_DISTURBED", 5)
    groups = [CallGroup(5), CallGroup(5, ((0, 9),)), CallGroup(1), CallGroup(50, ((2, 9),))]
    problem = ScheduleProblem(groups, [[0] * 4, [0] * 4, [0] * 4, [4, 0, 0, 0]], 1)
    assert improve(problem, [[0, 1, 2, 3]], [{0: 2, 2: 0, 1: 3, 3: 1}]) == (2, 3, 0, 1)


def test_an_impossible_order_is_refused() -> None:
    problem = ScheduleProblem([CallGroup(1, ((1, 0),)), CallGroup(1)], [[0, 0], [0, 0]], 1)
    with pytest.raises(ValueError, match="needs"):
        improve(problem, [[0, 1]])
