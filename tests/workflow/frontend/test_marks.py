"""Variables in texts of the user's: what is the value, and what is refused because it would be a representation."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import weft
from tests.workflow.frontend.test_flow import same, traced
from tests.workflow.shapes import graph, llm, text
from weft import ops
from weft.workflow.frontend.marks import NeedsValueError
from weft.workflow.frontend.trace import FlowError
from weft.workflow.graph import InvalidGraph
from weft.workflow.graph.templates import parse_template


@pytest.mark.parametrize(
    ("write", "template"),
    [
        (lambda q: f"C:\\data\\{q}", "C:\\data\\\\{{q}}"),
        (lambda q: f"\\\\{q}", "\\\\\\\\{{q}}"),
        (lambda q: f"\\{q}\\{{{{q}}}}", "\\\\{{q}}\\{{q}}"),
        (lambda q: f"{{{q}}}", "{{{q}}}"),
        (lambda q: f"{{{{{q}}}}}", "{{{{q}}}}"),
        (lambda q: "\\" + q, "\\\\{{q}}"),
        (lambda q: f"{weft.workflow.escape('{{q}} ' + chr(92))}{q}", "\\{{q}} \\\\{{q}}"),
        (lambda q: weft.workflow.escape(f"{{{{q}}}} is {q}"), "\\{{q}} is {{q}}"),
        (lambda q: json.dumps({"é": f"{q}"}), '{"\\\\u00e9": "{{q}}"}'.replace("\\\\", "\\")),
    ],
)
def test_a_variable_is_its_value_whatever_stands_before_it(write: Callable[[Any], str], template: str) -> None:
    same(lambda q: {"out": ops.text(write(q))}, graph(text("t", template)))
    same(lambda q: {"out": ops.llm(write(q))}, graph(llm("a", template)))
    same(lambda q: {"out": write(q)}, graph(text("t", template)))


def test_texts_that_look_like_marks_are_texts() -> None:
    for written in ("the variable :ref: `x`", "{{:}} {{:1:}} {{ :q: }}", "<variable q: text>"):
        same(lambda q, written=written: {"out": ops.text(written)}, graph(text("t", written)))


@pytest.mark.parametrize(
    "written",
    ["{{", ":}}", "{{:q:}}", "{{ :q:", "weftmark", "[\\uFDD0-\\uFDEF]", "\\ufd", "\ufdd0\ufdef\ue000\U0010fffd"],
)
def test_no_text_of_the_user_is_a_mark(written: str) -> None:
    same(lambda q: {"out": ops.text(f"{written}{q}{written}")}, graph(text("t", f"{written}{{{{q}}}}{written}")))
    same(lambda q: {"out": ops.data({"x": written})}, graph({"id": "d", "op": "data", "value": {"x": written}}))


@pytest.mark.parametrize(
    "escape",
    [
        lambda text: f"{[text]}",
        lambda text: json.dumps(json.dumps(text)),
        lambda text: json.dumps(text).replace("\\ufd", "\\uFD"),
        lambda text: json.dumps(f"\\{text}\\{text}"),
    ],
)
def test_an_escaped_variable_is_its_value(escape: Callable[[str], str]) -> None:
    made = traced(lambda q, other: {"out": ops.text(escape(f"{q} {other}"))}).graph.nodes[0]
    template = parse_template(made.template)  # type: ignore[union-attr]
    assert template.fill(str) == escape("q other").replace("\\uFD", "\\ufd")


def _part(start: int | None, end: int | None) -> Callable[[str], str]:
    return lambda text: text[start:end]


CUTS: dict[str, Callable[[str], str]] = {
    **{f"[:{end}]": _part(None, end) for end in range(len("Sum up: ") + 1, len("Sum up: ") + 20)},
    **{f"[{start}:]": _part(start, None) for start in range(len("Sum up: ") + 1, len("Sum up: ") + 20)},
    "[:4000]": lambda text: text[:4000].strip().lower(),
    "[12:14]": _part(12, 14),
    "[20:22]": _part(20, 22),
    "upper": str.upper,
    "lower": str.lower,
    "title": str.title,
    "capitalize": str.capitalize,
    "swapcase": str.swapcase,
    "replace": lambda text: text.replace("T", "t"),
    "ascii": lambda text: text.encode("ascii", "ignore").decode(),
    "words": lambda text: re.sub(r"[^a-zA-Z ]", "", text),
    "fill": lambda text: textwrap.fill(text, 15),
    "spaced": " ".join,
    "shortened JSON": lambda text: json.dumps(text)[:30],
    "upper JSON": lambda text: json.dumps(text).upper(),
    "lower JSON": lambda text: json.dumps(text).lower(),
    "two pieces": lambda text: text[:20] + text[23:],
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_piece_of_a_variable_is_no_text(cut: str) -> None:
    for use in (ops.text, ops.llm, ops.data, lambda made: ops.list({"a": made}), two, lambda made: made):

        def flow(q: Any, use: Callable[[Any], Any] = use) -> Any:
            return use(CUTS[cut](f"Sum up: {ops.text(q, name='document')}. {ops.text(q, name='d')}"))

        with pytest.raises(NeedsValueError, match=r"test_marks\.py:\d+: .*use value\[:20\],.*ops\.function"):
            _ = traced(lambda q: flow(q)).graph


def test_messages_show_variables_in_braces() -> None:
    for wrong, message in (
        (lambda q: ops.join(f"{q}"), "not the text '{q}'"),
        (lambda q: ops.loop(lambda a: a, q, at_limit=f"{q}"), "value '{q}'; there are"),
        (lambda q: {f"{q}": q}, "'{q}' is not a name"),
        (lambda q: ops.llm(f"{q}", stop=f"{q}"), r"llm.stop: q is"),
    ):
        with pytest.raises((FlowError, InvalidGraph), match=re.escape(message)):
            _ = traced(wrong).graph


def test_a_backslash_before_an_argument_of_a_semantic_function() -> None:
    @weft.semantic_function
    def say(path: weft.Input, answer: weft.Output):  # type: ignore[valid-type]
        """{{path}} {{answer}}"""

    same(lambda q: {"out": say(f"C:\\{q}")}, graph(llm("a", "C:\\\\{{q}}")))


@weft.semantic_function
def two(a: weft.Input, b: weft.Output, c: weft.Output):  # type: ignore[valid-type]
    """Say {{a}} {{b}} and more {{c}}"""


@pytest.mark.parametrize(
    "write",
    [
        lambda q: f"name: {q!r}",
        lambda q: f"{q=}",
        lambda q: f"{[q, q]}",
        lambda q: str({"a": q}),
        lambda q: f"{two(q)}",
        lambda q: f"{q.strip}",
        lambda q: f"{ops.llm(q).chat}",
    ],
)
def test_the_representation_of_a_variable_is_no_text(write: Callable[[Any], str]) -> None:
    for use in (ops.text, ops.llm, lambda made: ops.list(made), two, lambda made: made):

        def flow(q: Any, use: Callable[[Any], Any] = use) -> Any:
            return use(write(q))

        with pytest.raises(NeedsValueError, match=r"test_marks\.py:\d+: .*repr.*ops\.join"):
            _ = traced(lambda q: flow(q)).graph


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        (lambda q: ops.data(f"hi {q}"), r"data\.value: q .*ops\.text"),
        (lambda q: ops.llm("x", stop=f"{q}"), r"llm\.stop: q is a value of a row"),
        (lambda q: q.split(f"{q}"), r"pick\.split: q is a value of a row"),
        (lambda q: ops.switch(q, {f"{q}": lambda: q}), r"switch\.cases: q is a value of a row"),
        (lambda q: ops.program(f"{q}"), r"program\.program: q is a value of a row"),
    ],
)
def test_a_variable_cannot_stand_in_what_is_the_same_for_all_rows(wrong: Callable[[Any], Any], place: str) -> None:
    with pytest.raises(FlowError, match=r"test_marks\.py:\d+: " + place):
        _ = traced(wrong).graph


NAMES = {name: {"type": "string"} for name in ("get", "split", "chat", "set", "field", "strip", "regex", "matches")}
SCHEMA = {"type": "object", "properties": NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_named_like_a_method_has_its_value_by_its_name(name: str) -> None:
    field = {"id": "f", "op": "pick", "of": "a", "field": name}
    raw = graph(llm("a", "{{q}}", schema=SCHEMA), field, text("t", "{{f}}"), outputs={"out": "t"})
    same(lambda q: {"out": ops.text(f"{ops.llm(q, schema=SCHEMA)[name]}")}, raw)
    for use in (lambda made: ops.text(f"{made}"), lambda made: made, lambda made: ops.list({"a": made})):

        def flow(q: Any, use: Callable[[Any], Any] = use) -> Any:
            return use(getattr(ops.llm(q, schema=SCHEMA), name))

        with pytest.raises((NeedsValueError, FlowError), match=rf"\['{name}'\]|\[name\]"):
            _ = traced(lambda q: flow(q)).graph


def test_outputs_may_be_named_like_methods() -> None:
    def flow(q: Any) -> Any:
        made = ops.map(lambda item: {"get": item, "chat": ops.text(f"{item}!")}, q)
        return {"first": made[0], "second": made[1]}

    assert set(traced(flow).graph.outputs.values()) == {"map_1.get", "map_1.chat"}
