"""Operators: what they take beside variables, and what they say of what they do not take."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest

import weft
from tests.workflow.frontend.test_flow import same, traced
from tests.workflow.shapes import body, function, graph, llm, mapped, pick, switch, text
from weft import ops
from weft.workflow.frontend.trace import FlowError


class Kind(str, enum.Enum):  # noqa: UP042 - its `str` is not its value
    A = "a"
    B = "b"


class Size(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("key", "case"),
    [
        ("a", "a"),
        (Kind.A, "a"),
        (Size.ONE, "1"),
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (1.0, "1.0"),
        (1e20, "1e20"),
    ],
)
def test_a_case_is_what_the_value_is_as_text(key: Any, case: str) -> None:
    same(lambda q: {"out": ops.switch(q, {key: lambda: q})}, graph(switch("s", "q", **{case: body(value="q")})))


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (lambda q: {("a", "b"): lambda: q}, r"the case \('a', 'b'\) is never met: a case is a text"),
        (lambda q: {frozenset(): lambda: q}, r"the case frozenset\(\) is never met"),
        (lambda q: {q: lambda: q}, r"the case <variable :q: any> is never met"),
        (lambda q: {True: lambda: q, "true": lambda: q}, "two cases are 'true'"),
        (lambda q: {"a": lambda: (q, q), "b": lambda: q}, r"same outputs; cases\[a\] returns .*, and cases\[b\] "),
        (lambda q: {"a": lambda: q, "b": lambda: {"x": q, "y": q}}, r"same outputs; .* x, y"),
        (lambda q: {"a": ops.text("A")}, r"ops.switch\(value, \{case: body\}, default\): a body is a function"),
        (lambda q: [lambda: q], "takes a mapping of cases"),
    ],
)
def test_cases_that_are_never_met_are_refused(cases: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        _ = traced(lambda q: ops.switch(q, cases(q), lambda: q)).graph


def test_parts_of_a_message_are_joined_as_servers_do_it() -> None:
    def flow(q: Any) -> Any:
        parts = [{"type": "text", "text": f"Hi {q}"}, {"type": "text", "text": q}]
        return {"out": ops.llm([{"role": "user", "content": parts}])}

    same(flow, graph(llm("a", "Hi {{q}}\n{{q}}")))
    same(lambda q: {"out": ops.llm([ops.user([{"type": "text", "text": q}])])}, graph(llm("a", "{{q}}")))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, r"messages\[1\]\.content\[0\] is image input, which"),
        ({"type": "text"}, r"messages\[1\]\.content\[0\]\.text must be a string"),
        ({"text": "x"}, r"messages\[1\]\.content\[0\]\.type must be text"),
    ],
)
def test_other_parts_of_a_message_are_refused_by_name(part: dict[str, Any], message: str) -> None:
    def flow(q: Any) -> Any:
        return ops.llm([ops.system("s"), {"role": "user", "content": [part]}])

    with pytest.raises(FlowError, match=message):
        _ = traced(flow).graph


def test_functions_of_python_and_of_c() -> None:
    def flow(q: Any) -> Any:
        return {"a": ops.function(len, q), "b": ops.function(str.upper, q), "c": ops.function(int, q)}

    nodes = function("a", "len", obj="{{q}}"), function("b", "upper", self="{{q}}")
    third = function("c", "int", argument_0="{{q}}")
    same(flow, graph(*nodes, third, outputs={name: name for name in "abc"}))
    assert traced(flow).functions == {"len": len, "upper": str.upper, "int": int}


def replaced(text: str, old: str, new: str) -> str:
    return text.replace(old, new)


def test_partial_functions_methods_and_objects_have_names() -> None:
    class Shout:
        def __call__(self, text: str) -> str:
            return text + "!"

        def louder(self, text: str) -> str:
            return text + "!!"

    shout = Shout()

    def flow(q: Any) -> Any:
        first = ops.function(functools.partial(replaced, old="a"), q, new="b")
        return ops.function(shout.louder, ops.function(shout.louder, ops.function(shout, first)))

    assert set(traced(flow).functions) == {"replaced", "Shout", "louder"}


def tried(text: str, retries: int = 0, pure: str = "", called: str = "") -> str:
    return f"{text} {retries} {pure} {called}"


def test_parameters_that_are_named_like_those_of_the_operator() -> None:
    given = function("f", "tried", text="{{q}}", retries=3, called="x")
    same(lambda q: {"out": ops.function(tried, q, 3, called="x")}, graph(given))
    same(lambda q: {"out": ops.function(tried, q, 3, called="x", retries=2)}, graph(given | {"retries": 2}))
    native = weft.native_function(tried)
    raw = function("f", "tried", text="{{q}}", retries=3, pure="p", called="x")
    same(lambda q: {"out": native(q, retries=3, pure="p", called="x")}, graph(raw))
    with pytest.raises(FlowError, match=r"tried has a parameter 'retries', .* by position, or make a weft.native_func"):
        _ = traced(lambda q: ops.function(tried, q, retries=3)).graph


def test_a_map_over_a_list_of_python() -> None:
    inside = body(text("t", "{{i}}!"), value="t")
    items = {"id": "l", "op": "list", "of": ["{{q}}", "b"]}
    same(lambda q: {"out": ops.map(lambda i: ops.text(f"{i}!"), [q, "b"])}, graph(items, mapped("m", "l", inside)))


def test_operators_on_texts_of_python() -> None:
    data = {"id": "d", "op": "data", "value": "abc"}
    same(lambda q: {"out": ops.matches("abc", "b")}, graph(data, pick("p", "d", matches="b")))
    parts = function("s", "split", text="abc", max_tokens=2)
    same(lambda q: {"out": ops.split("abc", max_tokens=2)}, graph(parts))
    joined = function("j", "join", of="{{q}}", separator="{{q}}")
    same(lambda q: {"out": ops.join(q, q)}, graph(joined))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q: ops.map(q, lambda i: i), r"ops.map\(body, over\): a body is a function, and <variable"),
        (lambda q: ops.loop(q, lambda i: i), r"ops.loop\(body, init\): a body is a function"),
        (lambda q: ops.join("abc"), "ops.join takes a list, not the text 'abc'"),
        (lambda q: ops.function(q, "x"), "ops.function takes a function first, not <variable"),
    ],
)
def test_swapped_arguments_are_named(wrong: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        _ = traced(wrong).graph
