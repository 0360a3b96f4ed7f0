"""Rows in files: a row of JSON per line (.jsonl), and CSV. Read as a stream: memory holds one row, of bounded size."""

from __future__ import annotations

import codecs
import csv
import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from weft.workflow.frontend.row_source import RowSource, SourceRow, check_columns, invalid, to_row

MAX_ROW_BYTES = 200_000_000
_TORN = "; the last line has no line end: is the file complete?"
_ADVICE = {
    ".json": "write it as .jsonl, one row per line",
    ".tsv": "write it as .csv, with commas",
    ".gz": "unpack it",
    ".parquet": "read it with pyarrow or pandas, and give the table",
    ".xlsx": "save it as .csv",
}


def file_source(given: str | os.PathLike[str], max_row_bytes: int) -> RowSource:
    """The rows of a file. Raises `InvalidRows` for a file of another kind, or one that cannot be opened, and for a
    wrong header."""
    path = Path(given)
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".csv"):
        advice = _ADVICE.get(kind, "give a list of rows, or a mapping of columns")
        raise invalid(f"{path.name!r:.100} is neither a .jsonl nor a .csv file: {advice}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise invalid(f"{path}: {error.strerror}") from None
    if kind == ".jsonl":
        return RowSource(partial(_read_jsonl, path, max_row_bytes), path=path)
    columns = _header(path, max_row_bytes)
    return RowSource(partial(_read_csv, path, columns, max_row_bytes), columns=tuple(filter(None, columns)), path=path)


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their ends, and their numbers; None for a line that is too long."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(max_bytes + 1)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line:
                return
            if len(line) <= max_bytes or line.endswith(b"\n"):
                yield number, line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield number, None


def _too_long(max_bytes: int) -> str:
    return f"the row has more than {max_bytes:,} bytes; max_row_bytes sets the limit"


# ---- a row of JSON per line


def _read_jsonl(path: Path, max_bytes: int) -> Iterator[SourceRow]:
    for number, line in _lines(path, max_bytes):
        place = f"{path.name}:{number}"
        if line is None:
            yield SourceRow(place, None, _too_long(max_bytes))
        elif line.strip():
            try:
                row = to_row(place, msgspec.json.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                torn = "" if line.endswith(b"\n") else _TORN
                row = SourceRow(place, None, f"the line is not one JSON object: {error}{torn}")
            yield row


# ---- CSV


class _UnreadableLine(ValueError):
    """A line of CSV that is not text, or with which a row gets too long."""


class _CsvLines:
    """The lines of a file as `csv.reader` takes them, with the place and the size of the row that it reads."""

    def __init__(self, path: Path, max_bytes: int):
        self._lines = _lines(path, max_bytes)
        self._max_bytes = max_bytes
        self._size = 0
        self._number = 0
        self.first_line = 0
        self.is_torn = False

    def begin_row(self) -> None:
        """The next line is the first one of a row."""
        self._size = 0
        self.first_line = self._number + 1

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self._number, line = next(self._lines)
        self._size += 0 if line is None else len(line)
        if line is None or self._size > self._max_bytes:
            raise _UnreadableLine(_too_long(self._max_bytes))
        self.is_torn = not line.endswith(b"\n")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise _UnreadableLine(f"line {self._number} is not UTF-8: {error.reason} at byte {error.start}") from None


def _rows_of_csv(path: Path, max_bytes: int) -> Iterator[tuple[str, list[str] | str, bool]]:
    """(place, fields or what is wrong, whether the file ends without a line end here); lines without text are left
    out."""
    # One limit for the whole process, which stops fields of 128 KiB. It is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), max_bytes))
    lines = _CsvLines(path, max_bytes)
    reader = csv.reader(lines, strict=True)
    while True:
        lines.begin_row()
        found: list[str] | str
        try:
            found = next(reader)
        except StopIteration:
            return
        except (csv.Error, _UnreadableLine) as error:
            unclosed = str(error) == "unexpected end of data"
            found = "a field begins with a quote that nothing closes" if unclosed else str(error)
        if found:
            yield f"{path.name}:{lines.first_line}", found, lines.is_torn


def _header(path: Path, max_bytes: int) -> tuple[str, ...]:
    """The names of the columns, without white space around them; empty ones too. Raises `InvalidRows`."""
    place, header, _ = next(_rows_of_csv(path, max_bytes), (path.name, "the file is empty: there is no header", False))
    if isinstance(header, str):
        raise invalid(header, place)
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and separator in header[0]:
            raise invalid(f"the header has {name}: columns are separated by commas", place)
    return check_columns([name.strip() for name in header], place)


def _read_csv(path: Path, columns: tuple[str, ...], max_bytes: int) -> Iterator[SourceRow]:
    for place, fields, is_torn in itertools.islice(_rows_of_csv(path, max_bytes), 1, None):
        torn = _TORN if is_torn else ""
        if isinstance(fields, str):
            yield SourceRow(place, None, fields + torn)
        elif len(fields) != len(columns):
            counted = f"the row has {len(fields)} fields, and the header has {len(columns)}"
            yield SourceRow(place, None, counted + torn)
        else:
            yield SourceRow(place, {name: field for name, field in zip(columns, fields, strict=True) if name})
