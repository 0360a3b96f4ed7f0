"""The planner against the optimum, which two independent methods agree on."""

from __future__ import annotations

import pytest

from bench.schedule_gap import measure, plan_times, schedules_of, summary
from bench.schedules import milp
from bench.schedules.exact import ExactSearch
from bench.schedules.problems import problem_of
from bench.schedules.shapes import SHAPES, instance
from tests.workflow.planner.problems import possible_orders, random_problem
from weft.workflow.planner.cost import CallGroup, ScheduleProblem


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_of_all_orders(seed: int) -> None:
    problem = random_problem(seed, 6)
    orders = possible_orders(problem)
    best = min(problem.timing(order).makespan for order in orders)
    found = ExactSearch(problem).run(max(orders, key=lambda order: problem.timing(order).makespan))
    assert found.is_proven
    assert problem.timing(found.order).makespan == found.makespan == best


@pytest.mark.parametrize("seed", range(3))
def test_highs_and_the_search_agree(seed: int) -> None:
    problem = random_problem(seed, 7)
    known = tuple(range(7))
    solved, searched = milp.solve(problem, known), ExactSearch(problem).run(known)
    assert solved.is_proven
    assert solved.makespan == searched.makespan
    assert problem.timing(solved.order).makespan == solved.makespan


def test_without_a_proof_there_is_a_bound() -> None:
    problem = random_problem(0, 9)
    whole = ExactSearch(problem).run(tuple(range(9)))
    cut = ExactSearch(problem, max_states=20).run(tuple(range(9)))
    assert not cut.is_proven
    assert 0 < cut.bound <= whole.makespan <= cut.makespan
    early = milp.solve(problem, tuple(range(9)), max_nodes=0)
    assert early.bound <= whole.makespan <= early.makespan


def test_the_search_takes_single_calls_on_one_engine() -> None:
    with pytest.raises(ValueError, match="one engine"):
        ExactSearch(ScheduleProblem([CallGroup(1, engine=1)], [[0]], 1, num_engines=2))


@pytest.mark.parametrize("seed", range(5))
def test_plans_of_six_calls_are_near_the_proven_optimum(seed: int) -> None:
    result = measure(seed, 6, check_calls=6)
    assert result["proven"]
    assert result["proven_by_highs"]
    assert 0 <= result["gap_percent"]["plan"] <= 0.9


@pytest.mark.soak
def test_plans_of_eight_calls_are_near_the_proven_optimum() -> None:
    results = [measure(seed, 8, check_calls=8) for seed in range(20)]
    whole = summary(results)
    assert whole["proven_by_highs"] == len(results)
    assert whole["average_gap_percent"]["plan"] <= 0.5
    assert whole["maximum_gap_percent"]["plan"] <= 2


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_every_order_runs_every_call(seed: int) -> None:
    case = instance(seed, 12)
    problem = problem_of(case)
    assert 6 <= case.num_calls == len(problem.calls) <= 12
    for name, order in schedules_of(problem, seed).items():
        assert problem.problem.timing(order).makespan > 0, name


def test_instances_are_those_of_their_seed() -> None:
    assert instance(3, 12) == instance(3, 12)
    assert instance(3, 12) != instance(10, 12)
    assert {instance(seed, 12).name for seed in range(7)} == set(SHAPES)


def test_the_large_plan_has_all_calls() -> None:
    times = plan_times(repeats=1)
    assert (times["operators"], times["rows"]) == (88, 100)
