"""Schedules in few parts: the same calls in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.workflow.planner.groups import OperatorGroup

MAX_WIDTH = 64
"""Operators of one row up to which every number of them is tried as a part."""


class SchedulePart(NamedTuple):
    """A part of a schedule."""

    group: OperatorGroup
    start: float
    """In token steps."""


class _Piece(NamedTuple):
    """Parts that follow each other and are one."""

    num_parts: int
    group: OperatorGroup


def joined(parts: Sequence[SchedulePart]) -> list[SchedulePart]:
    """The same calls in the same order in the fewest parts: longer ranges of rows, several operators one after the
    other, or rows in which the same operators follow each other. Of as few parts, those that are longer first."""
    whole = [piece.group for piece in _pieces(parts, 0) if piece.num_parts == len(parts)] if parts else []
    if whole:  # the usual case: all operators of one row
        return [SchedulePart(min(whole, key=lambda group: group.order), parts[0].start)]
    chosen: list[_Piece] = []
    fewest = [0]
    for at in reversed(range(len(parts))):
        # `fewest` is counted from the end: that of the parts behind a piece stands `count` before its end.
        best = min(
            _pieces(parts, at), key=lambda piece: (fewest[-piece.num_parts], -piece.num_parts, piece.group.order)
        )
        fewest.append(1 + fewest[-best.num_parts])
        chosen.append(best)
    chosen.reverse()
    fewer: list[SchedulePart] = []
    at = 0
    while at < len(parts):
        piece = chosen[at]
        fewer.append(SchedulePart(piece.group, parts[at].start))
        at += piece.num_parts
    return fewer


def _pieces(parts: Sequence[SchedulePart], at: int) -> Iterator[_Piece]:
    """What may stand at the beginning of the parts from here on."""
    for piece in _more_rows(parts, at):
        yield piece
        yield from _more_operators(parts, at, piece)
    yield from _same_operators(parts, at)


def _more_rows(parts: Sequence[SchedulePart], at: int) -> Iterator[_Piece]:
    """The next rows of the same operators."""
    group, count = parts[at].group, 1
    yield _Piece(count, group)
    if len(group.operators) > 1 and group.order == "nodes":
        return
    for part in parts[at + 1 :]:
        following = part.group
        if following._replace(rows=group.rows) != group or following.rows[0] != group.rows[1]:
            return
        group = group._replace(rows=(group.rows[0], following.rows[1]))
        count += 1
        yield _Piece(count, group)


def _more_operators(parts: Sequence[SchedulePart], at: int, piece: _Piece) -> Iterator[_Piece]:
    """Further operators, each with all rows of the first."""
    count, group = piece
    if len(group.operators) > 1 and group.order == "rows":
        return
    while at + count < len(parts):
        following = parts[at + count].group
        if following.engine != group.engine or (len(following.operators) > 1 and following.order == "rows"):
            return
        rest = next((one for one in _more_rows(parts, at + count) if one.group.rows == group.rows), None)
        if rest is None or set(rest.group.operators) & set(group.operators):
            return
        group = group._replace(operators=group.operators + rest.group.operators)
        count += rest.num_parts
        yield _Piece(count, group)


def _same_operators(parts: Sequence[SchedulePart], at: int) -> Iterator[_Piece]:
    """Several operators in one row after the other."""
    first = parts[at].group
    row = first.rows[0]
    operators: list[int] = []
    for part in parts[at:]:
        if not _is_call(part.group, row, first.engine) or part.group.operators[0] in operators:
            break
        operators.append(part.group.operators[0])
    widths = {*range(2, min(len(operators), MAX_WIDTH)), *([len(operators)] if len(operators) > 1 else [])}
    for width in sorted(widths):
        own = tuple(operators[:width])
        rows = 1
        yield _Piece(width, OperatorGroup(own, (row, row + 1), first.engine, "rows"))
        while all(
            at + place < len(parts)
            and parts[at + place].group == OperatorGroup((operator,), (row + rows, row + rows + 1), first.engine)
            for place, operator in enumerate(own, rows * width)
        ):
            rows += 1
            yield _Piece(width * rows, OperatorGroup(own, (row, row + rows), first.engine, "rows"))


def _is_call(group: OperatorGroup, row: int, engine: int) -> bool:
    return len(group.operators) == 1 and group.rows == (row, row + 1) and group.engine == engine
