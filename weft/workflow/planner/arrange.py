"""The schedule of a workflow's rows: the groups of algorithm 1 over ranges of rows, in the best order found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from weft.workflow.analysis.operators import Operator
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.planner.groups import Costing, OperatorGroup, schedule_problem
from weft.workflow.planner.improve import improve
from weft.workflow.planner.place import EnginePlacement
from weft.workflow.planner.schedule import operator_groups

MAX_GROUPS = 64
"""Groups to order, unless the workflow has more operators. With so few calls each is a group of its own."""


MAX_EXCHANGED = 12
"""Ranges of rows, up to which any two of them may change places."""


class SchedulePart(NamedTuple):
    """A part of a schedule."""

    group: OperatorGroup
    start: float
    """In token steps."""


class Arrangement(NamedTuple):
    """A schedule: groups in order, each after those that it needs."""

    parts: tuple[SchedulePart, ...]
    token_steps: float
    """When the last call completes."""

    def calls(self) -> list[tuple[int, int]]:
        """(operator, row) in order."""
        return [call for part in self.parts for call in part.group.calls()]


def arrange(
    operators: Sequence[Operator], tree: PrefixTree, costing: Costing, placement: EnginePlacement
) -> Arrangement:
    """The schedule of all rows."""
    num_rows = costing.prompts.num_rows
    if not operators or not num_rows:
        return Arrangement((), 0.0)
    sequence = operator_groups(operators, tree, costing, placement.ranges[0])
    if len(operators) * num_rows <= MAX_GROUPS:
        starts = _orders_of_calls(sequence, costing, placement)
    else:
        starts = _orders_of_groups(sequence, costing, placement)
    groups = starts[0]
    at = {group: number for number, group in enumerate(groups)}
    problem = schedule_problem(groups, costing)
    order = improve(problem, [[at[group] for group in start] for start in starts], _exchanges(groups))
    timing = problem.timing(order)
    parts = [SchedulePart(groups[number], timing.starts[number] / problem.ticks) for number in order]
    return Arrangement(tuple(joined(parts)), timing.makespan / problem.ticks)


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
                groups += [whole._replace(operators=some, rows=part) for some in each for part in _cut(rows, pieces)]
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


def _cut(rows: tuple[int, int], pieces: int) -> list[tuple[int, int]]:
    """A range in so many parts of nearly the same length, none empty."""
    start, end = rows
    count = min(pieces, end - start)
    bounds = [start + number * (end - start) // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))


def joined(parts: Sequence[SchedulePart]) -> list[SchedulePart]:
    """The same calls in the same order in fewer parts: longer ranges of rows, and rows in which the same operators
    follow each other."""
    whole: list[SchedulePart] = []
    at = 0
    while at < len(parts):
        count, group = max((_run_of_rows(parts, at), _run_of_nodes(parts, at)), key=lambda run: run[0])
        whole.append(SchedulePart(group, parts[at].start))
        at += count
    return whole


def _run_of_nodes(parts: Sequence[SchedulePart], at: int) -> tuple[int, OperatorGroup]:
    """How many parts from here on are the next rows of the same operators, and the group of all."""
    group, count = parts[at].group, 1
    for part in parts[at + 1 :]:
        following = part.group
        if following._replace(rows=group.rows) != group or following.rows[0] != group.rows[1]:
            break
        group = group._replace(rows=(group.rows[0], following.rows[1]))
        count += 1
    return count, group


def _run_of_rows(parts: Sequence[SchedulePart], at: int) -> tuple[int, OperatorGroup]:
    """How many parts from here on are several operators in one row after the other, and the group of all."""
    first = parts[at].group
    start, end = first.rows
    if len(first.operators) > 1 or end - start > 1:
        return 0, first
    width = 1
    while at + width < len(parts) and _is_call(parts[at + width].group, start, first.engine):
        width += 1
    operators = tuple(part.group.operators[0] for part in parts[at : at + width])
    rows = 1
    while at + (rows + 1) * width <= len(parts) and all(
        part.group == OperatorGroup((operator,), (start + rows, start + rows + 1), first.engine)
        for operator, part in zip(operators, parts[at + rows * width :], strict=False)
    ):
        rows += 1
    if width == 1:
        return 0, first
    return width * rows, OperatorGroup(operators, (start, start + rows), first.engine, "rows")


def _is_call(group: OperatorGroup, row: int, engine: int) -> bool:
    return len(group.operators) == 1 and group.rows == (row, row + 1) and group.engine == engine
