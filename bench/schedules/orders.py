"""Orders that systems without a planner would run calls in (Helium, section 7.3)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weft.workflow.planner.cost import ScheduleProblem

Call = tuple[int, int]
"""(operator, row)"""


def query_wise(calls: Sequence[Call]) -> list[int]:
    """Row by row, each to its end."""
    return sorted(range(len(calls)), key=lambda number: (calls[number][1], calls[number][0]))


def operator_wise(calls: Sequence[Call]) -> list[int]:
    """Operator by operator, each for all rows."""
    return sorted(range(len(calls)), key=lambda number: calls[number])


def at_random(problem: ScheduleProblem, seed: int) -> list[int]:
    """Whenever the engine is free, any call that has what it needs."""
    drawn = random.Random(seed)
    return _online(problem, lambda ready, _: drawn.choice(ready))


def longest_prefix_first(problem: ScheduleProblem, output_tokens: Sequence[int]) -> list[int]:
    """Whenever the engine is free, the call that has what it needs and shares most with the one before."""

    def choose(ready: list[int], last: int | None) -> int:
        if last is None:
            return ready[0]
        # Savings are tokens x output tokens.
        return max(ready, key=lambda number: (problem.savings[last][number] // output_tokens[number], -number))

    return _online(problem, choose)


def _online(problem: ScheduleProblem, choose: Callable[[list[int], int | None], int]) -> list[int]:
    """What a queue makes that knows only calls whose values are there."""
    order: list[int] = []
    ends: dict[int, int] = {}
    clock = 0
    while len(order) < len(problem.groups):
        starts = {
            number: max((ends[need] + delay for need, delay in group.needs), default=0)
            for number, group in enumerate(problem.groups)
            if number not in ends and all(need in ends for need, _ in group.needs)
        }
        clock = max(clock, min(starts.values()))
        chosen = choose([number for number, start in starts.items() if start <= clock], order[-1] if order else None)
        saved = problem.savings[order[-1]][chosen] if order else 0
        clock += problem.groups[chosen].usage - saved
        ends[chosen] = clock
        order.append(chosen)
    return order
