"""Token steps are those of Helium's section 5."""

from __future__ import annotations

import pytest

from tests.workflow.planner.problems import KV_TOKENS, possible_orders, random_calls
from weft.workflow.planner.cost import CallGroup, PlannedCall, ScheduleProblem, call_problem


def by_definition(tokens: list[int], calls: list[PlannedCall], order: tuple[int, ...]) -> float:
    """The formulas of section 5 as they stand there, in floating point."""
    alpha = 1 / KV_TOKENS
    completion: dict[int, float] = {}
    clock = 0.0
    previous: PlannedCall | None = None
    for number in order:
        call = calls[number]
        common = 0
        while previous is not None and previous.path[common : common + 1] == call.path[common : common + 1] != ():
            common += 1
        prefill = sum(tokens[segment] for segment in call.path[common:])
        usage = alpha * (call.output_tokens * prefill + 0.5 * call.output_tokens * (call.output_tokens + 1))
        begin = clock
        for need in call.needs:
            begin = max(begin, completion[need] + alpha * KV_TOKENS * calls[need].output_tokens)
        clock = completion[number] = begin + usage
        previous = call
    return max(completion.values())


@pytest.mark.parametrize("seed", range(5))
def test_every_order_costs_what_the_definition_says(seed: int) -> None:
    tokens, calls = random_calls(seed, 5)
    problem = call_problem(tokens, calls, KV_TOKENS)
    orders = possible_orders(problem)
    assert orders
    for order in orders:
        assert problem.token_steps(order) == pytest.approx(by_definition(tokens, calls, order), rel=1e-12)


def test_two_calls_by_hand() -> None:
    calls = [PlannedCall((0, 1), 10), PlannedCall((0, 2), 20, needs=(0,))]
    problem = call_problem([100, 30, 50], calls, 1000)
    # (10 x 130 + 55) / 1000, a delay of 10, then (20 x 50 + 210) / 1000: the first 100 tokens are shared
    assert problem.token_steps([0, 1]) == pytest.approx(1.355 + 10 + 1.21)


def test_an_order_has_each_call_once_and_after_what_it_needs() -> None:
    problem = call_problem([1, 1], [PlannedCall((0,), 1), PlannedCall((1,), 1, needs=(0,))], 10)
    with pytest.raises(ValueError, match="needs"):
        problem.timing([1, 0])
    with pytest.raises(ValueError, match="once"):
        problem.timing([0, 0])


def test_engines_run_beside_each_other_and_wait_for_each_other() -> None:
    groups = [CallGroup(10), CallGroup(20, engine=1), CallGroup(5, ((1, 3),)), CallGroup(4, engine=1)]
    timing = ScheduleProblem(groups, [[100] * 4] * 4, 1, num_engines=2).timing([0, 1, 2, 3])
    # Group 2 saves 100 behind group 0, on its engine, and begins 3 after group 1 of the other engine.
    assert timing.starts == (0, 0, 23, 20)


def test_rows_of_a_group_follow_the_rows_that_they_need() -> None:
    no_savings = [[0, 0], [0, 0]]
    before = CallGroup(100, first=10, last=10)
    # Ten rows of 10 each; the first may begin at 10 + 5, the last only at 100 + 5.
    quick = ScheduleProblem([before, CallGroup(20, ((0, 5),), 0, 2, 2)], no_savings, 1).timing([0, 1])
    assert quick.ends == (100, 120)
    other_engine = ScheduleProblem([before, CallGroup(20, ((0, 5),), 1, 2, 2)], no_savings, 1, 2).timing([0, 1])
    assert other_engine.starts[1] == 15
    assert other_engine.ends[1] == 107
