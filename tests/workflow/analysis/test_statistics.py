"""What was measured comes first, then what the graph and the rows say, then defaults."""

from __future__ import annotations

import msgspec
import pytest

from weft.workflow.analysis.statistics import (
    DEFAULT_ITEMS,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_VALUE_TOKENS,
    Statistics,
    list_value,
    row_value,
    sampled_rows,
)


def test_answers_are_as_long_as_measured_and_never_longer_than_allowed() -> None:
    known = Statistics({"a": {"output_tokens": 70.4}})
    assert known.output_tokens("a", {}) == 70
    assert known.output_tokens("a", {"max_tokens": 50}) == 50
    assert known.output_tokens("b", {"max_tokens": 50}) == 25
    assert known.output_tokens("b", {"max_tokens": 50, "max_completion_tokens": 8}) == 4
    assert known.output_tokens("b", {}) == DEFAULT_OUTPUT_TOKENS


def test_lists_loops_and_switches() -> None:
    known = Statistics({"m": {"items": 3}, "l": {"rounds": 2}, "s": {"shares": {"x": 0.7}}})
    assert (known.items("m", 9), known.items("n", 9), known.items("n")) == (3, 9, DEFAULT_ITEMS)
    assert (known.rounds("l", 9, True), known.rounds("k", 9, True), known.rounds("k", 9, False)) == (2, 5, 9)
    assert known.rounds("l", 1, True) == 1
    assert (known.share("s", "x", 2), known.share("s", "y", 2), known.share("t", "y", 4)) == (0.7, 0.0, 0.25)
    assert (known.value_tokens("v"), known.value_tokens("v", 7)) == (DEFAULT_VALUE_TOKENS, 7)


def test_a_field_that_is_no_statistic_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="outputs"):
        Statistics({"a": {"outputs": 3}})


def test_equal_values_are_one_class_and_counted_once() -> None:
    counted = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    value = row_value(["aa", "b", "aa", {"k": 1}], count)
    assert value.classes == (0, 1, 0, 2)
    assert value.tokens == (2, 1, 2, 7)
    assert counted == ["aa", "b", '{"k":1}']


def test_equal_items_are_one_class_whatever_lists_they_are_in() -> None:
    value = list_value([["aa", "b"], [], ["b", "cccc"], ["aa", "b"]], len)
    assert value.classes == (0, 1, 2, 0)
    assert value.tokens == (2, 0, 2, 2)  # means: 1.5 and 2.5
    assert value.lengths == (2, 0, 2, 2)
    assert value.items == (0, 1, 1, 2, 0, 1)


def test_what_values_begin_with_alike_is_the_own_of_one() -> None:
    def count(text: str) -> int:
        return len(text.split())

    values = ["a b c d e", "x", "a b c f g", "a b", "x"]
    value = row_value(values, count)
    assert value.least is not None
    assert list(value.least()) == [2, 0, 1, 1]  # of c d e, of x, of f g, and of a b, each less one


def test_a_tenth_of_the_rows_is_sampled() -> None:
    assert sampled_rows(0) == ()
    assert sampled_rows(4) == (0,)
    assert sampled_rows(30) == (0, 10, 20)
    assert len(sampled_rows(10_000)) == len(set(sampled_rows(10_000))) == 30
