"""Rows: the table that a workflow runs over, one run for each row. A column is an input of the graph.

Owns the checks of a table against a graph, before anything runs. Sources are read from the start each time and are
never kept in memory; an iterator can be read once, so its rows are checked when they come.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.workflow.frontend.json_values import NotJson, as_json
from weft.workflow.frontend.row_files import MAX_ROW_BYTES, file_source
from weft.workflow.frontend.row_source import MAX_MISTAKES, InvalidRows, RowSource, SourceRow, invalid
from weft.workflow.frontend.row_tables import table_source
from weft.workflow.graph.check import check
from weft.workflow.graph.mistakes import InvalidGraph, Mistake, nearest
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.value_types import TEXT, ValueType, of_value

MAX_TYPES = 256
"""Types of values, such as objects with other fields, that are checked. Rows with further ones fail when they run."""


class Rows:
    """A table: a list of mappings, a mapping of columns, an iterable of mappings, the path of a .jsonl or .csv file, a
    DataFrame of pandas, or an Arrow table. Fields of CSV are texts. `max_row_bytes` limits a row of a file."""

    def __init__(self, source: Any, *, max_row_bytes: int = MAX_ROW_BYTES, constants: Collection[str] = ()):
        """`constants` are parameters of a flow that no column can set: a row that has one is wrong. Raises
        `InvalidRows` for a value that is not a table. No row is read yet."""
        self._constants = tuple(constants)
        if isinstance(source, Rows):
            self._source: RowSource = source._source
            self._constants += source._constants
        elif isinstance(source, (str, os.PathLike)):
            self._source = file_source(source, max_row_bytes)
        else:
            self._source = table_source(source)
        self._count = self._source.num_rows

    @property
    def path(self) -> Path | None:
        """The file that has the rows; None: they are in memory."""
        return self._source.path

    def count(self) -> int | None:
        """How many rows there are, unreadable ones too. A file is read for it, once. None for an iterator."""
        if self._count is None and not self._source.is_once:
            self._count = sum(1 for _ in self._source.read())
        return self._count

    def check(self, graph: WorkflowGraph) -> CheckedRows:
        """Read all rows and check them against a graph; those of an iterator are checked when they are read. Raises
        `InvalidRows` with the first mistakes, and `InvalidGraph`."""
        checked = CheckedRows(self._source, graph, self._constants)
        if not self._source.is_once:
            self._count = checked.read_all()
        return checked


class CheckedRows:
    """The rows of a graph: of each row, the columns that are inputs."""

    def __init__(self, source: RowSource, graph: WorkflowGraph, constants: Collection[str]):
        mistakes = check(graph)
        if mistakes:
            raise InvalidGraph(mistakes)
        self._source = source
        self._graph = graph
        self._constants = constants
        self._wrong: dict[tuple[str, str], list[str]] = {}
        """(column, its type as text) -> why the graph cannot take it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows. Raises `InvalidRows` at a row with mistakes, and can go on after it; and for an empty table."""
        return map(self._inputs, _not_empty(self._source.read()))

    def read_all(self) -> int:
        """Check every row. Returns how many there are. Raises `InvalidRows` with the first `MAX_MISTAKES`."""
        columns = self._source.columns
        mistakes = list(self._source.mistakes)
        if columns is not None:
            mistakes += [Mistake("", what) for what in self._column_mistakes(columns)]
        is_wrong = bool(mistakes)
        count = 0
        for row in self._source.read() if is_wrong else _not_empty(self._source.read()):
            count += 1
            try:
                self._inputs(row)
            except InvalidRows as error:
                mistakes += error.mistakes
                if len(mistakes) >= MAX_MISTAKES:
                    what = f"The {'table and its ' if is_wrong else ''}first {count:,} rows have"
                    raise InvalidRows(_grouped(mistakes), what) from None
        if mistakes:
            raise InvalidRows(_grouped(mistakes))
        return count

    def _inputs(self, row: SourceRow) -> dict[str, Any]:
        values = _values(row)
        found: dict[str, Any] = {}
        wrong: dict[str, list[str]] = {}
        for name in self._graph.inputs:
            if name not in values:
                continue
            try:
                found[name] = as_json(values[name])
            except NotJson as error:
                wrong[name] = [f"{name}: {error}"]
        wrong |= self._type_mistakes(found)
        mistakes = [] if self._source.columns is not None else self._column_mistakes(values)
        mistakes += [each for name in self._graph.inputs for each in wrong.get(name, ())]
        if mistakes:
            raise InvalidRows([Mistake(row.place, each) for each in mistakes])
        return found

    def _column_mistakes(self, columns: Collection[str]) -> list[str]:
        """Why the graph cannot take these columns, of a row or of all rows."""
        return [_no_column(name, columns) for name in self._graph.inputs if name not in columns] + [
            f"the flow cannot take the column {name!r}: its parameter of this name has a default, which makes it a "
            "constant. Remove the default, or the column"
            for name in self._constants
            if name in columns
        ]

    def _type_mistakes(self, values: Mapping[str, Any]) -> dict[str, list[str]]:
        """Column -> why the graph cannot take the type of its value."""
        types = {name: TEXT if isinstance(value, str) else of_value(value) for name, value in values.items()}
        keys = {name: (name, _as_text(kind)) for name, kind in types.items()}
        new = [name for name, key in keys.items() if key not in self._wrong][: MAX_TYPES - len(self._wrong)]
        if new:
            # A column is wrong by itself, but mostly none is, which one look at the graph tells of all.
            none_wrong = not check(self._graph, inputs={name: types[name] for name in new})
            for name in new:
                mistakes = [] if none_wrong else check(self._graph, inputs={name: types[name]})
                self._wrong[keys[name]] = [f"{name}: {mistake}" for mistake in mistakes]
        return {name: wrong for name, key in keys.items() if (wrong := self._wrong.get(key))}


def _as_text(kind: ValueType) -> str:
    return kind.kind if kind.fields is None and kind.items is None else str(kind)


def _values(row: SourceRow) -> Mapping[str, Any]:
    if row.values is None:
        raise invalid(row.problem, row.place)
    return row.values


def _not_empty(rows: Iterator[SourceRow]) -> Iterator[SourceRow]:
    first = next(rows, None)
    if first is None:
        raise invalid("there are no rows")
    yield first
    yield from rows


def _no_column(name: str, columns: Iterable[str]) -> str:
    names = [str(column) for column in columns]
    shown = ", ".join(names[:MAX_MISTAKES]) + (", ..." if len(names) > MAX_MISTAKES else "")
    return f"there is no column {name!r}.{nearest(name, names) or f' There are {shown}.' if names else ''}"


def _grouped(mistakes: list[Mistake]) -> list[Mistake]:
    """Equal messages of several rows as one."""
    places: dict[str, list[str]] = {}
    for mistake in mistakes:
        places.setdefault(mistake.message, []).append(mistake.place)
    return [
        Mistake(rows[0] if len(rows) == 1 else f"{rows[0]} and {len(rows) - 1} more", message)
        for message, rows in places.items()
    ]
