"""Tables of every kind give the same rows, and what a graph cannot take is said before anything runs."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.workflow.shapes import body, function, graph, llm, mapped, text
from weft.workflow.frontend import rows as rows_module
from weft.workflow.frontend.json_values import as_json
from weft.workflow.frontend.row_source import InvalidRows, SourceRow
from weft.workflow.frontend.rows import MAX_TYPES, Rows, _values
from weft.workflow.graph import InvalidGraph, WorkflowGraph, graph_from_dict
from weft.workflow.graph.check import check
from weft.workflow.graph.mistakes import Mistake
from weft.workflow.graph.nodes import LlmNode

TABLE = [{"q": "What?", "n": 1}, {"q": "naïve, “quoted”\nline", "n": 2}]
GRAPH = graph_from_dict(graph(llm("a", "{{q}}")))
"""One input, `q`, in a text."""
MAPPED = graph_from_dict(graph(mapped("m", "q", body(text("t", "{{i}}"), value="t"))))
"""One input, `q`, which is a list."""


DATA = graph_from_dict(graph(function("f", "measure", value="{{q}}")))
"""One input, `q`, of any type."""


def of(*inputs: str) -> WorkflowGraph:
    return graph_from_dict(graph(text("t", "".join(f"{{{{{name}}}}}" for name in inputs)), inputs=list(inputs)))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def every(rows: Rows) -> Iterator[dict[str, Any]]:
    """The rows with all their columns. Raises `InvalidRows` at a row that is none, and can go on after it."""

    def values(row: SourceRow) -> dict[str, Any]:
        return as_json(_values(row))

    return map(values, rows._source.read())


def mistakes(source: Any, graph: WorkflowGraph = GRAPH, **options: Any) -> list[str]:
    with pytest.raises(InvalidRows) as caught:
        Rows(source, **options).check(graph)
    return [str(mistake) for mistake in caught.value.mistakes]


# ---- every kind of table


class Again:
    """Iterable, and neither a list nor an iterator."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TABLE)


@pytest.mark.parametrize(
    "source",
    [
        TABLE,
        tuple(map(MappingProxyType, TABLE)),
        {"q": [row["q"] for row in TABLE], "n": (1, 2)},
        {"q": np.array([row["q"] for row in TABLE], object), "n": np.array([1, 2], np.int32)},
        (row for row in TABLE),
        Again(),
        Rows(TABLE),
    ],
    ids=["list", "tuple", "columns", "arrays", "generator", "iterable", "rows"],
)
def test_tables_in_memory(source: Any) -> None:
    rows = list(every(Rows(source)))
    assert rows == TABLE
    assert [type(value) for row in rows for value in row.values()] == [str, int, str, int]


JSONL = '{"q": "What?", "n": 1}\n{"n": 2, "q": "na\\u00efve, “quoted”\\nline"}\n'
CSV = 'q,n\nWhat?,1\n"naïve, “quoted”\nline",2\n'


@pytest.mark.parametrize("change", ["", "bom", "crlf", "blank", "no end"])
@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "T.CSV"])
def test_tables_in_files(tmp_path: Path, name: str, change: str) -> None:
    is_csv = name.lower().endswith("csv")
    content, end = (CSV if is_csv else JSONL), "\n"
    if change == "bom":
        content = "\ufeff" + content
    elif change == "crlf":
        content, end = content.replace("\n", "\r\n"), "\r\n"
    elif change == "blank":
        content = "\n" + content + "\n\n"
    elif change == "no end":
        content = content.removesuffix("\n")
    rows = Rows(str(written(tmp_path, name, content)))
    wanted = [{"q": row["q"].replace("\n", end), "n": str(row["n"])} for row in TABLE] if is_csv else TABLE  # type: ignore[attr-defined]
    assert list(every(rows)) == wanted
    assert list(every(rows)) == wanted
    assert rows.count() == 2
    assert rows._source.columns == (("q", "n") if is_csv else None)


def test_a_frame_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"q": ["a", None], "n": [1.5, math.nan], "day": pandas.to_datetime(["2020-01-01", None])})
    frame["i"] = pandas.array([7, None], "Int64")
    frame["b"] = np.array([True, False])
    rows = Rows(frame.drop(columns="day"))
    assert list(every(rows)) == [{"q": "a", "n": 1.5, "i": 7, "b": True}, {"q": None, "n": None, "i": None, "b": False}]
    assert type(next(every(rows))["b"]) is bool
    assert rows.count() == 2
    assert list(every(Rows([{"q": pandas.NA}, {"q": pandas.NaT}]))) == [{"q": None}] * 2
    assert list(Rows(frame).check(GRAPH)) == [{"q": "a"}, {"q": None}]
    (mistake,) = mistakes(frame, of("day"))
    assert mistake.startswith("row 0: day: a value of pandas.")
    assert mistake.endswith("Timestamp is not JSON: give it as text, such as value.isoformat()")
    assert mistakes(pandas.DataFrame([[1]])) == ["the column 0 has no name: names of columns are texts"]
    assert mistakes(pandas.DataFrame([[1, 2]], columns=["q", "q"])) == ["2 columns are called 'q'"]


def test_a_table_of_arrow() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"q": ["a", None] * 1500, "l": [[1], []] * 1500})
    for source in (table, table.to_batches()[0]):
        rows = Rows(source)
        assert list(every(rows)) == [{"q": "a", "l": [1]}, {"q": None, "l": []}] * 1500
        assert rows.count() == 3000
        assert rows._source.columns == ("q", "l")
    assert mistakes(pyarrow.table([[1], [2]], ["q", "q"])) == ["2 columns are called 'q'"]


def test_only_iterators_are_read_once() -> None:
    rows = Rows(iter(TABLE))
    assert rows.count() is None
    assert list(every(rows)) == TABLE
    with pytest.raises(InvalidRows, match="were read already: give a list or a file"):
        list(every(rows))


# ---- values


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(1.5), 1.5),
        (np.float32(0.5), 0.5),
        (np.int8(3), 3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array(5), 5),
        ((1, [{"a": np.int64(2)}]), [1, [{"a": 2}]]),
        (None, None),
        (10**30, 10**30),
        (HTTPStatus.OK, 200),
    ],
)
def test_values_become_plain_json(value: Any, plain: Any) -> None:
    (row,) = Rows([{"q": value}]).check(DATA)
    assert row == {"q": plain}
    assert type(row["q"]) is type(plain)


class Odd:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "q: nan is not a number of JSON: use None where there is no value"),
        ([1, {"x": math.inf}], "q: [1].x: inf is not a number of JSON: use None where there is no value"),
        (np.float32("nan"), "q: nan is not a number of JSON: use None where there is no value"),
        (b"x", "q: a value of builtins.bytes is not JSON: decode it to text"),
        (np.zeros(2), "q: a value of numpy.ndarray is not JSON: give it as a list, by value.tolist()"),
        (Odd(), f"q: a value of {__name__}.Odd is not JSON: give a text, a number, true, false, None, a list"),
        ({1: 2}, "q: 1 names a field, and names are texts"),
        ("\ud800", "q: the text has half of a surrogate pair, which no encoding has"),
        (LOOP, "q: it is nested too deeply"),
    ],
)
def test_values_that_are_no_json(value: Any, message: str) -> None:
    (mistake,) = mistakes([{"q": "x"}, {"q": value, "r": value}])
    assert mistake.startswith(f"row 1: {message}")
    rows = iter(Rows(iter([{"q": value}, {"q": "x"}])).check(GRAPH))
    with pytest.raises(InvalidRows, match=r"row 0: "):
        next(rows)
    assert next(rows) == {"q": "x"}


# ---- what is no table


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            3,
            "rows are a list of objects, a mapping of columns, a .jsonl or .csv file, a DataFrame or an Arrow",
        ),
        (b"x", "rows are a list of objects"),
        ([], "there are no rows"),
        ({}, "there are no columns"),
        ({"q": []}, "there are no rows"),
        ({"q": "What?"}, "q: a column is a list of values, and this is of type str; one row is [{...}]"),
        ({"q": iter("ab")}, "q: a column is a list of values, and this is of type str_"),
        ({3: []}, "the column 3 has no name: names of columns are texts"),
        ({"q": [1, 2, 3], "r": [1], "s": [1, 2, 3]}, "the columns have unequal lengths: q 3, r 1, s 3"),
        ([["What?"]], "row 0: a row is an object, column -> value, and this is of type list"),
        ("rows.json", "'rows.json' is neither a .jsonl nor a .csv file: write it as .jsonl, one row per line"),
        ("rows.txt", "'rows.txt' is neither a .jsonl nor a .csv file: give a list of rows, or a mapping of columns"),
        ("What is this?", "'What is this?' is neither a .jsonl nor a .csv file"),
        ("nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
    ],
)
def test_what_is_no_table(source: Any, message: str) -> None:
    (mistake,) = mistakes(source)
    assert mistake.startswith(message)


def test_an_empty_iterator_is_found_when_it_is_read() -> None:
    with pytest.raises(InvalidRows, match="there are no rows"):
        list(Rows(iter([])).check(GRAPH))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'["What?"]\n', "a row is an object, column -> value, and this is of type list"),
        (b"{'q': 1}\n", "the line is not one JSON object: JSON is malformed: object keys must be strings (byte 1)"),
        (b'{"q": 1}{\n', "the line is not one JSON object: JSON is malformed: trailing characters (byte 9)"),
        (b'{"q": NaN}\n', "the line is not one JSON object: JSON is malformed: invalid character (byte 6)"),
        (b'{"q": 1e999}\n', "the line is not one JSON object: Number out of range"),
        (b'{"q": "\xff"}\n', "the line is not one JSON object: 'utf-8' codec can't decode byte 0xff"),
        (b'{"q": "What', "the line is not one JSON object: Input data was truncated; the last line has no line end"),
        (b'{"q":' + b"[" * 9999 + b"]" * 9999 + b"}\n", "the line is not one JSON object: maximum recursion depth"),
        (b'{"q": "' + b"x" * 100_000 + b'"}\n', "the row has more than 100,000 bytes; max_row_bytes sets the limit"),
        (b'{"q": "' + b"x" * 3_000_000, "the row has more than 100,000 bytes; max_row_bytes sets the limit"),
    ],
)
def test_wrong_lines_of_jsonl(tmp_path: Path, line: bytes, message: str) -> None:
    path = written(tmp_path, "t.jsonl", b'{"q": "x"}\n\n' + line)
    (mistake,) = mistakes(path, max_row_bytes=100_000)
    assert mistake.startswith(f"t.jsonl:3: {message}")
    if line.endswith(b"\n"):
        path.write_bytes(path.read_bytes() + b'{"q": "y"}\n')
        rows = every(Rows(path, max_row_bytes=100_000))
        assert next(rows) == {"q": "x"}
        with pytest.raises(InvalidRows):
            next(rows)
        assert list(rows) == [{"q": "y"}]


def test_a_row_of_the_largest_size(tmp_path: Path) -> None:
    for size, ends in ((20, "\n"), (20, "")):
        path = written(tmp_path, "t.jsonl", '{"q": "%s"}' % ("x" * (size - 9)) + ends)
        assert list(every(Rows(path, max_row_bytes=size))) == [{"q": "x" * 11}]
        with pytest.raises(InvalidRows):
            list(every(Rows(path, max_row_bytes=size - 1 - (ends == ""))))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"c\n", "t.csv:4: the row has 1 fields, and the header has 2"),
        (b"c,d,e\n", "t.csv:4: the row has 3 fields, and the header has 2"),
        (b"c", "t.csv:4: the row has 1 fields, and the header has 2; the last line has no line end"),
        (b'"c"d,e\n', "t.csv:4: ',' expected after '\"'"),
        (b'"c,d\n\ne,f\n', "t.csv:4: a field begins with a quote that nothing closes"),
        (b'c,"d\n\xff"\n', "t.csv:4: line 5 is not UTF-8: invalid start byte at byte 0"),
        (b"x" * 101 + b",d\n", "t.csv:4: the row has more than 100 bytes; max_row_bytes sets the limit"),
        (b'"c\n' + b"c\n" * 60, "t.csv:4: the row has more than 100 bytes; max_row_bytes sets the limit"),
    ],
)
def test_wrong_lines_of_csv(tmp_path: Path, lines: bytes, message: str) -> None:
    path = written(tmp_path, "t.csv", b'q,r\n"a\n",b\n' + lines)
    first, *_ = mistakes(path, max_row_bytes=100)
    assert first.startswith(message)


def test_rows_of_csv_after_a_wrong_one(tmp_path: Path) -> None:
    rows = every(Rows(written(tmp_path, "t.csv", 'q,r\na\n"c"d,e\nf,g\n')))
    for _ in range(2):
        with pytest.raises(InvalidRows):
            next(rows)
    assert list(rows) == [{"q": "f", "r": "g"}]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "t.csv: the file is empty: there is no header"),
        (b"\xef\xbb\xbf\r\n\r\n", "t.csv: the file is empty: there is no header"),
        (b"q;r\na;b\n", "t.csv:1: the header has semicolons: columns are separated by commas"),
        (b"q\tr\na\tb\n", "t.csv:1: the header has tabs: columns are separated by commas"),
        (b"\nq,q\na,b\n", "t.csv:2: 2 columns are called 'q'"),
        (b",\na,b\n", "t.csv:1: there are no columns"),
        (b"q\n", "there are no rows"),
        (b'"q\n', "t.csv:1: a field begins with a quote that nothing closes"),
    ],
)
def test_wrong_headers(tmp_path: Path, header: bytes, message: str) -> None:
    assert mistakes(written(tmp_path, "t.csv", header)) == [message]


def test_long_fields_and_columns_without_a_name(tmp_path: Path) -> None:
    long = "x" * 300_000
    rows = Rows(written(tmp_path, "t.csv", f",q,a;b,\n0,{long},c,\n"))
    assert rows._source.columns == ("q", "a;b")
    assert list(every(rows)) == [{"q": long, "a;b": "c"}]


# ---- against a graph


def test_missing_columns_are_named_with_the_nearest() -> None:
    wide = of("question", "context")
    columns = {"questions": ["x"], "text": ["y"]}
    assert mistakes(columns, wide) == [
        "there is no column 'question'. Did you mean questions?",
        "there is no column 'context'. Did you mean text?",
    ]
    assert mistakes([{"zz": 1}], of("q")) == ["row 0: there is no column 'q'. There are zz."]
    assert mistakes([{}], of("q")) == ["row 0: there is no column 'q'."]


CONSTANT = "the flow cannot take the column 'k'"
NO_COLUMN = "there is no column 'r'"
NO_LIST = "a column is a list of values"
UNEQUAL = "the columns have unequal lengths"
WIDE = "the row has 3 fields, and the header has 2"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"q": ["x"], "s": []}, [UNEQUAL, NO_COLUMN]),
        ({"q": ["x", b"", "y"], "s": [1, 2]}, [UNEQUAL, NO_COLUMN, "row 1: q: a value of builtins.bytes"]),
        ({"q": "x", "s": 3}, [f"q: {NO_LIST}", f"s: {NO_LIST}", NO_COLUMN]),
        ({"q": "x", "s": [1], "k": []}, [f"q: {NO_LIST}", UNEQUAL, NO_COLUMN, CONSTANT]),
        ({"q": [[]], "k": [1]}, [NO_COLUMN, CONSTANT, "row 0: q: t.template: q is a list"]),
        ({3: [], "q": [], 4: []}, ["the column 3 has no name", "the column 4 has no name"]),
        (
            [{"k": 1}, {"q": b"", "r": 1}],
            ["row 0: there is no column 'q'", f"row 0: {NO_COLUMN}", CONSTANT, "row 1: q: a value"],
        ),
        ("q,s\nx,y\nx,y,z\n1,2,3\n", [NO_COLUMN, f"t.csv:3 and 1 more: {WIDE}"]),
        ('q,k\nx,y,z\nx"y,"z"w\n', [NO_COLUMN, CONSTANT, f"t.csv:2: {WIDE}", "t.csv:3: "]),
    ],
)
def test_all_mistakes_of_a_table_are_reported_together(tmp_path: Path, source: Any, expected: list[str]) -> None:
    table = written(tmp_path, "t.csv", source) if isinstance(source, str) else source
    found = mistakes(table, of("q", "r"), constants=["k"])
    assert len(found) == len(expected), found
    for mistake, part in zip(found, expected, strict=True):
        assert part in mistake


def test_names_of_columns_have_no_white_space_around_them(tmp_path: Path) -> None:
    rows = Rows(written(tmp_path, "t.csv", "q , n\na, 1\n"))
    assert rows._source.columns == ("q", "n")
    assert list(every(rows)) == [{"q": "a", "n": " 1"}]
    with pytest.raises(InvalidRows, match="2 columns are called 'q'"):
        Rows(written(tmp_path, "t.csv", "q,q \na,1\n"))


@pytest.mark.parametrize(
    "table", [[{"q": "a", "n": 1}], iter([{"q": "a", "n": 1}]), {"q": ["a"], "n": [1]}, Rows([{"q": "a", "n": 1}])]
)
def test_a_column_that_would_be_left_aside_for_a_constant_is_refused(table: Any) -> None:
    with pytest.raises(InvalidRows, match="the flow cannot take the column 'n': its parameter of this name has a def"):
        list(Rows(table, constants=["n"]).check(GRAPH))
    assert list(Rows([{"q": "a", "m": 1}], constants=["n"]).check(GRAPH)) == [{"q": "a"}]


def test_columns_that_are_no_inputs_are_left_out() -> None:
    checked = Rows([{"q": "x", "b": b""}, {"a": 1, "q": "x", "b": 2}]).check(GRAPH)
    assert list(checked) == [{"q": "x"}, {"q": "x"}]


def test_the_first_mistakes_are_shown_together() -> None:
    rows: list[Any] = [{"q": "x"}] * 5 + [{"p": 1}] * 15 + [{"q": math.nan}, 3, {"q": b""}, {"q": b""}, {"q": b""}, 4]
    with pytest.raises(InvalidRows) as caught:
        Rows(rows).check(GRAPH)
    assert str(caught.value).splitlines() == [
        "The first 25 rows have 4 mistakes:",
        "  row 5 and 14 more: there is no column 'q'. There are p.",
        "  row 20: q: nan is not a number of JSON: use None where there is no value",
        "  row 21: a row is an object, column -> value, and this is of type int",
        "  row 22 and 2 more: q: a value of builtins.bytes is not JSON: decode it to text",
    ]
    assert caught.value.param == "row 5 and 14 more"
    assert len(mistakes(rows[:7])) == 1


def test_types_that_a_graph_cannot_take() -> None:
    assert mistakes([{"q": "x"}, {"q": ["x"]}, {"q": ["y", 2]}]) == [
        "row 1 and 1 more: q: a.messages[0].content: q is a list and cannot be part of a text: join it with the "
        "function `join`"
    ]
    assert mistakes([{"q": ["x"]}, {"q": "x"}], MAPPED) == [
        "row 1: q: m.over: must be a list, and q is a text: use split, or a list"
    ]
    assert mistakes({"q": [{"b": 1}]}, graph_from_dict(graph(llm("a", "{{q.a}}")))) == [
        "row 0: q: a.messages[0].content: q.a: there is no field 'a'; there are b."
    ]


def test_rows_of_an_iterator_are_checked_when_they_are_read() -> None:
    checked = Rows(iter([{"q": "x"}, {"q": []}, {"q": 1, "z": 2}])).check(GRAPH)
    rows = iter(checked)
    assert next(rows) == {"q": "x"}
    with pytest.raises(InvalidRows, match="q is a list"):
        next(rows)
    assert list(rows) == [{"q": 1}]


def test_the_number_of_types_that_are_checked_is_bounded() -> None:
    rows: list[Any] = [{"q": {f"f{number}": 1}} for number in range(MAX_TYPES)]
    checked = Rows(rows).check(GRAPH)
    assert len(checked._wrong) == MAX_TYPES
    checked = Rows([*rows, {"q": [1]}]).check(GRAPH)
    assert len(checked._wrong) == MAX_TYPES


def test_a_graph_with_mistakes_is_refused_as_such() -> None:
    wrong = WorkflowGraph(inputs=("q",), nodes=(LlmNode(id="a", prompt="{{nobody}}"),), outputs={"a": "a"})
    with pytest.raises(InvalidGraph, match="nobody"):
        Rows(TABLE).check(wrong)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    _check_memory(tmp_path, 3_000)


@pytest.mark.soak
def test_memory_does_not_grow_with_a_large_file(tmp_path: Path) -> None:
    _check_memory(tmp_path, 1_000_000)


def _check_memory(folder: Path, count: int) -> None:
    line = '{"q": "%s"}\n' % ("x" * 1000)
    path = folder / "t.jsonl"
    with path.open("w") as file:
        for _ in range(count):
            file.write(line)
    rows = Rows(path)
    tracemalloc.start()
    checked = rows.check(GRAPH)
    assert sum(1 for _ in checked) == rows.count() == count
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000 < count * len(line)


def test_columns_whose_types_fit_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"c{number}" for number in range(20)]
    node = LlmNode(id="a", prompt=" ".join(f"{{{{{name}}}}}" for name in names))
    whole = WorkflowGraph(inputs=tuple(names), nodes=(node,), outputs={"a": "a"})
    looks: list[Any] = []

    def look(graph: WorkflowGraph, **options: Any) -> list[Mistake]:
        looks.append(options)
        return check(graph, **options)

    monkeypatch.setattr(rows_module, "check", look)
    Rows([dict.fromkeys(names, "x")] * 5).check(whole)
    assert len(looks) == 2  # the graph without types, and with those of the first row
    with pytest.raises(InvalidRows, match="c7 is a list"):
        Rows([dict.fromkeys(names, "x") | {"c7": []}]).check(whole)
