"""Joined parts are the same calls in the same order, and few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.workflow.planner.groups import OperatorGroup
from weft.workflow.planner.join import SchedulePart, joined

Call = tuple[int, int]


def parts_of(calls: list[Call], engine: int = 0) -> list[SchedulePart]:
    return [
        SchedulePart(OperatorGroup((operator,), (row, row + 1), engine), float(at))
        for at, (operator, row) in enumerate(calls)
    ]


def calls_of(parts: list[SchedulePart]) -> list[Call]:
    return [call for part in parts for call in part.group.calls()]


@given(st.permutations([(operator, row) for operator in range(4) for row in range(4)]))
def test_any_order_keeps_its_calls(calls: list[Call]) -> None:
    found = joined(parts_of(calls))
    assert calls_of(found) == calls
    ends = [0]
    for part in found:
        assert part.start == ends[-1]
        ends.append(ends[-1] + len(part.group.calls()))


def groups(calls: list[Call]) -> list[tuple[tuple[int, ...], tuple[int, int], str]]:
    return [(part.group.operators, part.group.rows, part.group.order) for part in joined(parts_of(calls))]


def test_operators_with_the_same_rows_are_one_part() -> None:
    calls = [(operator, row) for operator in (2, 0, 1) for row in (1, 2, 3)]
    assert groups(calls) == [((2, 0, 1), (1, 4), "nodes")]


def test_rows_with_the_same_operators_are_one_part() -> None:
    calls = [(operator, row) for row in (1, 2, 3) for operator in (2, 0, 1)]
    assert groups(calls) == [((2, 0, 1), (1, 4), "rows")]


def is_part(calls: list[Call]) -> bool:
    """Whether one group has these calls in this order."""
    operators = tuple(dict.fromkeys(operator for operator, _ in calls))
    rows = [row for _, row in calls]
    both = (OperatorGroup(operators, (min(rows), max(rows) + 1), order=order) for order in ("rows", "nodes"))
    return any(group.calls() == calls for group in both)


@given(st.permutations([(operator, row) for operator in range(3) for row in range(3)]))
def test_no_order_has_fewer_parts(calls: list[Call]) -> None:
    fewest = [0]
    for end in range(1, len(calls) + 1):
        fewest.append(min(1 + fewest[start] for start in range(end) if is_part(calls[start:end])))
    assert len(joined(parts_of(calls))) == fewest[-1]


def test_parts_of_other_engines_stay_apart() -> None:
    parts = [*parts_of([(0, 0)]), *parts_of([(0, 1)], engine=1)]
    assert joined(parts) == parts
