"""Random scheduling problems of single calls."""

from __future__ import annotations

import itertools
import random

from weft.workflow.planner.cost import PlannedCall, ScheduleProblem, call_problem

KV_TOKENS = 8192


def random_calls(seed: int, size: int) -> tuple[list[int], list[PlannedCall]]:
    """Segment lengths, and calls whose prompts form a tree."""
    drawn = random.Random(seed)
    tokens = [drawn.randint(20, 600) for _ in range(size + 3)]
    paths: list[tuple[int, ...]] = [(0,), (1,), (2,)]
    calls = []
    for number in range(size):
        path = (*drawn.choice(paths), 3 + number)
        paths.append(path)
        needs = tuple(sorted(drawn.sample(range(number), min(number, drawn.choice([0, 0, 1, 1, 2])))))
        calls.append(PlannedCall(path, drawn.randint(30, 400), needs))
    return tokens, calls


def random_problem(seed: int, size: int) -> ScheduleProblem:
    return call_problem(*random_calls(seed, size), KV_TOKENS)


def possible_orders(problem: ScheduleProblem) -> list[tuple[int, ...]]:
    needs = [{need for need, _ in group.needs} for group in problem.groups]
    return [
        order
        for order in itertools.permutations(range(len(needs)))
        if all(needs[group] <= set(order[:at]) for at, group in enumerate(order))
    ]
