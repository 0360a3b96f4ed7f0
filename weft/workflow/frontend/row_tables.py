"""Rows in memory: lists of rows, mappings of columns, iterables; tables of pandas and Arrow, without importing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weft.workflow.frontend.json_values import is_missing
from weft.workflow.frontend.row_source import RowSource, SourceRow, check_columns, invalid, to_row
from weft.workflow.graph.mistakes import Mistake

_ARROW_ROWS = 1024
"""Rows of an Arrow table that are Python objects at a time."""


def table_source(given: Any) -> RowSource:
    """The rows of an object. Raises `InvalidRows` for one that has none."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(given).__mro__}
    if "pandas.DataFrame" in kinds:
        return _of_pandas(given)
    if kinds & {"pyarrow.Table", "pyarrow.RecordBatch"}:
        return _of_arrow(given)
    if isinstance(given, Mapping):
        return _of_columns(given)
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
        raise invalid(
            f"rows are a list of objects, a mapping of columns, a .jsonl or .csv file, a DataFrame or an Arrow table, "
            f"not {type(given).__name__}"
        )
    if isinstance(given, Iterator):
        return _of_iterator(given)
    count = len(given) if isinstance(given, Sequence) else None
    return RowSource(lambda: _numbered(given), num_rows=count)


def _numbered(rows: Iterable[Any]) -> Iterator[SourceRow]:
    return (to_row(f"row {number}", row) for number, row in enumerate(rows))


def _of_iterator(rows: Iterator[Any]) -> RowSource:
    unread = [rows]

    def read() -> Iterator[SourceRow]:
        if not unread:
            raise invalid("the rows of an iterator were read already: give a list or a file")
        return _numbered(unread.pop())

    return RowSource(read, is_once=True)


def _of_columns(columns: Mapping[Any, Any]) -> RowSource:
    names = check_columns(list(columns))
    lists: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    for name, values in columns.items():
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
            kind = type(values).__name__
            what = f"a column is a list of values, and this is of type {kind}; one row is [{{...}}]"
            mistakes.append(Mistake(name, what))
        else:
            lists[name] = values
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        mistakes.append(Mistake("", f"the columns have unequal lengths: {shown}"))

    def read() -> Iterator[SourceRow]:
        return _numbered(dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=False))

    return RowSource(read, columns=names, num_rows=min(lengths.values(), default=0), mistakes=tuple(mistakes))


def _of_pandas(frame: Any) -> RowSource:
    names = check_columns(list(frame.columns))

    def read() -> Iterator[SourceRow]:
        rows = frame.itertuples(index=False, name=None)
        return _numbered(
            {name: None if is_missing(value) else value for name, value in zip(names, row, strict=True)} for row in rows
        )

    return RowSource(read, columns=names, num_rows=len(frame))


def _of_arrow(table: Any) -> RowSource:
    names = check_columns(list(table.schema.names))
    starts = range(0, table.num_rows, _ARROW_ROWS)
    return RowSource(
        lambda: _numbered(row for start in starts for row in table.slice(start, _ARROW_ROWS).to_pylist()),
        columns=names,
        num_rows=table.num_rows,
    )
