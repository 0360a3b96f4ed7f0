"""The schedule of a workflow's rows: the groups of algorithm 1 over ranges of rows, in the best order found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from weft.workflow.analysis.operators import Operator
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.planner.groups import Costing, OperatorGroup, schedule_problem
from weft.workflow.planner.improve import MAX_STEPS, improve
from weft.workflow.planner.join import SchedulePart, joined
from weft.workflow.planner.place import EnginePlacement
from weft.workflow.planner.schedule import operator_groups
from weft.workflow.planner.windows import cut, in_windows

MAX_GROUPS = 64
"""Groups to order, unless the workflow has more operators. With so few calls each is a group of its own."""


GROUP_STEPS = 20_000
"""Steps of the improvement where groups have many calls: half of those for single calls, because Algorithm 1 leaves
less to improve there, and the plan of a large workflow should take 50 ms."""


MAX_EXCHANGED = 12
"""Ranges of rows, up to which any two of them may change places."""


class Arrangement(NamedTuple):
    """A schedule: groups in order, each after those that it needs."""

    parts: tuple[SchedulePart, ...]
    token_steps: float
    """When the last call completes."""

    def calls(self) -> list[tuple[int, int]]:
        """(operator, row) of each call, in the order of the schedule."""
        return [call for part in self.parts for call in part.group.calls()]


def arrange(
    operators: Sequence[Operator], tree: PrefixTree, costing: Costing, placement: EnginePlacement
) -> Arrangement:
    """The schedule of all rows; of more calls than are ordered one by one, in windows of rows that fit the engines."""
    num_rows = costing.prompts.num_rows
    if not operators or not num_rows:
        return Arrangement((), 0.0)
    sequence = operator_groups(operators, tree, costing, placement.ranges[0])
    is_single = len(operators) * num_rows <= MAX_GROUPS
    if is_single:
        starts, steps = _orders_of_calls(sequence, costing, placement), MAX_STEPS
    else:
        starts, steps = _orders_of_groups(sequence, costing, placement), GROUP_STEPS
    groups = starts[0]
    at = {group: number for number, group in enumerate(groups)}
    problem = schedule_problem(groups, costing)
    order = improve(problem, [[at[group] for group in start] for start in starts], _exchanges(groups), steps)
    timing = problem.timing(order)
    parts = [SchedulePart(groups[number], timing.starts[number] / problem.ticks) for number in order]
    token_steps, fewest = timing.makespan / problem.ticks, joined(parts)
    if is_single:
        return Arrangement(tuple(fewest), token_steps)
    return Arrangement(in_windows(fewest, token_steps, costing, placement), token_steps)


def _orders_of_calls(
    sequence: Sequence[tuple[int, ...]], costing: Costing, placement: EnginePlacement
) -> list[list[OperatorGroup]]:
    """All calls, one by one: as the groups have them, operator by operator, and row by row."""
    engine_of = {
        (operator, row): placement.engines[operator][number]
        for operators in sequence
        for operator in operators
        for number, (first, end) in enumerate(placement.ranges)
        for row in range(first, end)
    }
    rows = range(costing.prompts.num_rows)
    nested = [
        call for operators in sequence for call in costing.best_order(OperatorGroup(operators, (0, len(rows)))).calls()
    ]
    by_operator = [(operator, row) for operators in sequence for operator in operators for row in rows]
    by_row = [(operator, row) for row in rows for operators in sequence for operator in operators]
    return [
        [OperatorGroup((operator,), (row, row + 1), engine_of[operator, row]) for operator, row in calls]
        for calls in (nested, by_operator, by_row)
    ]


def _orders_of_groups(
    sequence: Sequence[tuple[int, ...]], costing: Costing, placement: EnginePlacement
) -> list[list[OperatorGroup]]:
    """Groups over ranges of rows: group by group, and range by range."""
    pieces = max(1, MAX_GROUPS // (len(sequence) * len(placement.ranges)))
    groups = []
    for operators in sequence:
        for number, rows in enumerate(placement.ranges):
            for engine in sorted({placement.engines[operator][number] for operator in operators}):
                mine = tuple(one for one in operators if placement.engines[one][number] == engine)
                whole = costing.best_order(OperatorGroup(mine, rows, engine))
                each = [mine] if whole.order == "rows" else [(operator,) for operator in mine]
                groups += [whole._replace(operators=some, rows=part) for some in each for part in cut(rows, pieces)]
    return [groups, sorted(groups, key=lambda group: group.rows)]


def _exchanges(groups: Sequence[OperatorGroup]) -> list[dict[int, int]]:
    """For any two ranges of rows with the same operators on the same engines: the groups of one for the other's."""
    by_range: dict[tuple[int, int], dict[tuple[tuple[int, ...], int], int]] = {}
    for number, group in enumerate(groups):
        by_range.setdefault(group.rows, {})[group.operators, group.engine] = number
    if len(by_range) > MAX_EXCHANGED:
        return []
    found = []
    for one, other in itertools.combinations([by_range[rows] for rows in sorted(by_range)], 2):
        if one.keys() == other.keys():
            found.append({one[key]: other[key] for key in one} | {other[key]: one[key] for key in one})
    return found
