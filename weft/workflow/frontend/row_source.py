"""What every source of rows is to its readers: rows with their places, or what is wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.abi.errors import InvalidRequest
from weft.workflow.graph.mistakes import Mistake, listing

MAX_MISTAKES = 20
"""Mistakes in rows after which a table is read no further."""


class InvalidRows(InvalidRequest):
    """Rows that a workflow cannot take. `param` is the place of the first mistake."""

    def __init__(self, mistakes: Sequence[Mistake], what: str = "The table has"):
        super().__init__(listing(what, mistakes, MAX_MISTAKES), mistakes[0].place or None)
        self.mistakes = tuple(mistakes)


class SourceRow(NamedTuple):
    """One row as its source has it."""

    place: str
    """`row 3`, counted from 0, or file and line."""
    values: Mapping[str, Any] | None
    """None where the row cannot be read."""
    problem: str = ""
    """Why not."""


class RowSource(NamedTuple):
    """Reads rows again and again, with what is known of them before."""

    read: Callable[[], Iterator[SourceRow]]
    """From the first row on, each time."""
    columns: tuple[str, ...] | None = None
    """Those of every row, where they are known before it is read."""
    num_rows: int | None = None
    """How many rows there are, where that is known before they are read."""
    is_once: bool = False
    """Whether the rows can be read once only; a second time raises `InvalidRows`."""
    path: Path | None = None
    """The file that has the rows; None: they are in memory."""
    mistakes: tuple[Mistake, ...] = ()
    """Of the table as a whole. Its rows have only what can be read."""


def invalid(message: str, place: str = "") -> InvalidRows:
    """The error of one mistake."""
    return InvalidRows([Mistake(place, message)])


def to_row(place: str, row: Any) -> SourceRow:
    """A row that has to be an object."""
    if isinstance(row, Mapping):
        return SourceRow(place, row)
    return SourceRow(place, None, f"a row is an object, column -> value, and this is of type {type(row).__name__}")


def check_columns(names: Sequence[Any], place: str = "") -> tuple[str, ...]:
    """The names of columns. Raises `InvalidRows` for those that are no texts, or stand twice."""
    counts = Counter(names)
    mistakes = [
        Mistake(place, f"the column {name!r:.60} has no name: names of columns are texts")
        if not isinstance(name, str)
        else Mistake(place, f"{count} columns are called {name!r}")
        for name, count in counts.items()
        if not isinstance(name, str) or (name and count > 1)
    ]
    if not any(names) and not mistakes:
        mistakes.append(Mistake(place, "there are no columns"))
    if mistakes:
        raise InvalidRows(mistakes)
    return tuple(names)
