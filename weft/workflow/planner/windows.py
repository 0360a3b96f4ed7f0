"""Windows of rows: as many as have KV in an engine's cache run before the next ones.

The order of `arrange` counts only what a call shares with the one before it. Where that is most with the same operator
of the next row, it goes through all rows with one operator after the other. If more rows than fit have begun, what a
later operator continues has left the cache when it comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.workflow.planner.groups import Costing
from weft.workflow.planner.join import SchedulePart
from weft.workflow.planner.place import EnginePlacement

WINDOW_PART = 0.5
"""Of an engine's KV, for the rows of one window: calls of the next one begin while the last ones of it run. Where that
is too little for a row, a window has as many as fit the whole, if they have conversations that go on: else a row uses
nothing again that other rows would displace."""
MAX_PARTS = 1024
"""Of a schedule in windows; one that would need more stays whole."""

RowRange = tuple[int, int]
"""From, to (exclusive)."""


def in_windows(
    parts: Sequence[SchedulePart], token_steps: float, costing: Costing, placement: EnginePlacement
) -> tuple[SchedulePart, ...]:
    """The parts of a schedule that takes `token_steps`, in the same order within each window, all of one window before
    the next. Starts are those of a schedule in which a window takes the time of its part of the rows."""
    windows = [_windows(costing, placement, number) for number in range(len(placement.ranges))]
    count = max(map(len, windows))
    if count == 1 or count * len(parts) > MAX_PARTS:
        return tuple(parts)
    found = []
    for number in range(count):
        for part in parts:
            for rows, cuts in zip(placement.ranges, windows, strict=True):
                if number < len(cuts) and (some := _common(part.group.rows, cuts[number])) is not None:
                    done, share = ((row - rows[0]) / (rows[1] - rows[0]) for row in (cuts[number][0], cuts[number][1]))
                    start = done * token_steps + (share - done) * part.start
                    found.append(SchedulePart(part.group._replace(rows=some), start))
    return tuple(found)


def _windows(costing: Costing, placement: EnginePlacement, number: int) -> list[RowRange]:
    """The windows of a range of the placement: one where all rows fit, or where not even one does."""
    rows = placement.ranges[number]
    by_engine: dict[int, list[int]] = {}
    for operator, engines in enumerate(placement.engines):
        by_engine.setdefault(engines[number], []).append(operator)
    count = 1
    for engine, operators in by_engine.items():
        common, own = _kv_tokens(costing, operators, rows)
        capacity = costing.kv_tokens[engine]
        part, whole = capacity * WINDOW_PART - common, capacity - common
        if own.sum() <= whole or own.max() > whole:
            continue
        if own.max() <= part:
            count = max(count, int(np.ceil(own.sum() / part)))
        elif _continues(costing, operators, rows):
            count = max(count, int(np.ceil(len(own) / (whole // own.max()))))
    return cut(rows, count)


def _continues(costing: Costing, operators: Sequence[int], rows: RowRange) -> bool:
    """Whether the prompt of some operator begins like that of one that it needs, and otherwise than in other rows."""
    prompts = costing.prompts
    for operator in operators:
        for need in costing.operators[operator].needs:
            node = prompts.last_common[operator, need]
            if node >= 0:
                classes = prompts.classes[node][slice(*rows)]
                if (classes != classes[0]).any():
                    return True
    return False


def _kv_tokens(costing: Costing, operators: Sequence[int], rows: RowRange) -> tuple[int, npt.NDArray[np.float64]]:
    """KV of the prompts and answers of some operators: tokens that all rows have in common, and [rows] those of each
    row. Prefixes that only some rows share count for each of them."""
    prompts = costing.prompts
    common, own = 0, np.zeros(rows[1] - rows[0], np.float64)
    for node in sorted({node for operator in operators for node in prompts.paths[operator]}):
        tokens, classes = prompts.tokens[node][slice(*rows)], prompts.classes[node][slice(*rows)]
        if (classes == classes[0]).all():
            common += int(tokens[0])
        else:
            own += tokens
    own += sum(costing.operators[one].calls * costing.operators[one].output_tokens for one in operators)
    return common, own


def cut(rows: RowRange, pieces: int) -> list[RowRange]:
    """A range in so many parts of nearly the same length, none empty."""
    start, end = rows
    count = min(pieces, end - start)
    bounds = [start + number * (end - start) // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _common(one: RowRange, other: RowRange) -> RowRange | None:
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else None
