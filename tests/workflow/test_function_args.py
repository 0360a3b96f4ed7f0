"""Arguments of functions: what a graph names, a call gives as the function takes it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from weft.workflow.function_args import call_args, graph_args, name_of
from weft.workflow.run.functions import called_function


class Suffix:
    """An object that can be called, and one with a method."""

    def __call__(self, x: str) -> str:
        return x + "c"

    def method(self, x: str) -> str:
        return x + "m"


def plain(x: Any, y: Any = 2) -> Any:
    return [x, y]


def by_position(x: Any, /, y: Any = 2) -> Any:
    return [x, y]


def rest(x: Any, *more: Any, key: Any = None) -> Any:
    return [x, *more, key]


def keywords(x: Any, **others: Any) -> Any:
    return [x, others]


@pytest.mark.parametrize(
    ("function", "args", "named"),
    [
        (len, ("abc",), {}),
        (int, ("12",), {}),
        (float, ("1.5",), {}),
        (str, (3,), {}),
        (sorted, ([3, 1],), {"reverse": True}),
        (sum, ([3, 1],), {}),
        (max, (*range(11), 3), {}),
        (max, ([3, 1],), {"default": 0}),
        (str.upper, ("abc",), {}),
        (functools.partial(str.replace, "aba", "b"), ("c",), {}),
        (Suffix(), ("a",), {}),
        (Suffix().method, ("a",), {}),
        (plain, (1,), {"y": 3}),
        (by_position, (1,), {"y": 3}),
        (by_position, (1, 3), {}),
        (rest, (1, 2, 3), {"key": 4}),
        (rest, (1,), {}),
        (keywords, (1,), {"a": 2, "others": 3}),
        (lambda *args, **named: [args, named], (1, 2), {"a": 3}),
    ],
)
def test_a_call_is_the_same_through_a_graph(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    given = graph_args(function, args, named)
    assert all(name.isidentifier() for name in given)
    by_position, by_name = call_args(function, given)
    assert function(*by_position, **by_name) == function(*args, **named)


def test_a_graph_written_by_hand_gives_all_arguments_by_name() -> None:
    assert call_args(plain, {"x": 1, "y": 2}) == ([], {"x": 1, "y": 2})
    assert call_args(keywords, {"x": 1, "a": 2}) == ([], {"x": 1, "a": 2})
    assert call_args(plain, {"z": 1}) == ([], {"z": 1})


def test_names() -> None:
    assert name_of(functools.partial(functools.partial(plain, 1), 2)) == "plain"
    assert name_of(Suffix()) == "Suffix"
    assert name_of(Suffix().method) == "method"
    assert name_of(len) == "len"


def test_a_run_calls_functions_as_they_take_their_arguments() -> None:
    for called, given, value in ((len, {"obj": "abc"}, 3), (rest, {"x": 1, "more": [2]}, [1, 2, None])):
        assert asyncio.run(called_function({"f": called}, "f", given, 10.0)) == value
