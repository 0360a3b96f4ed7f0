"""Algorithm 1: depth first through the prefix tree, by chains of work, without waiting where it can."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.planner.analysed import analysed, costing_of, words
from tests.workflow.random_graphs import INPUTS, graphs
from tests.workflow.shapes import graph, llm
from weft.workflow.planner.schedule import operator_groups


def groups_of(raw: dict[str, Any], rows: int, statistics: dict[str, Any] | None = None) -> list[tuple[str, ...]]:
    work = analysed(raw, rows, statistics)
    groups = operator_groups(work.unrolled.operators, work.tree, costing_of(work), (0, rows))
    return [tuple(work.unrolled.operators[number].node for number in group) for group in groups]


def agent(name: str, system: str, user: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"id": name, "op": "llm", "messages": messages}


def test_the_example_of_figure_4() -> None:
    """Agent 2's two calls follow each other, although the first could run before agent 1's."""
    second = words(200, "second")
    raw = graph(
        agent("one", words(200, "first"), "{{q}}"),
        agent("two", second, "{{q}} answer"),
        agent("three", second, "{{q}} judge {{one}}"),
        outputs={"a": "two", "b": "three"},
    )
    assert [node for group in groups_of(raw, 1) for node in group] == ["one", "two", "three"]


def test_what_shares_a_value_of_the_row_is_one_group() -> None:
    raw = graph(
        *(agent(name, "Role", f"{{{{q}}}} {name}") for name in ("a", "b")),
        agent("c", "Other role", "{{q}}"),
        outputs={"a": "a", "b": "b", "c": "c"},
    )
    assert sorted(groups_of(raw, 10)) == [("a", "b"), ("c",)]


def test_the_longest_chain_comes_first() -> None:
    raw = graph(
        agent("short", "Short", "{{q}}"),
        agent("long", "Long", "{{q}}"),
        agent("after", "After", "{{long}}"),
        outputs={"a": "short", "b": "after"},
    )
    assert groups_of(raw, 2)[0] == ("long",)


def test_a_call_that_needs_another_is_never_in_its_group() -> None:
    raw = graph(
        llm("a", "{{q}}"), {"id": "b", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "?"}]}
    )
    assert groups_of(raw, 50) == [("a",), ("b",)]


@settings(max_examples=25)
@given(graphs(), st.integers(1, 5))
def test_every_operator_runs_once_after_what_it_needs(raw: dict[str, Any], rows: int) -> None:
    values = [{name: f"{name} {row}" for name in INPUTS} for row in range(rows)]
    work = analysed(raw, values)
    operators = work.unrolled.operators
    groups = operator_groups(operators, work.tree, costing_of(work), (0, rows))
    assert sorted(number for group in groups for number in group) == list(range(len(operators)))
    done: set[int] = set()
    for group in groups:
        assert all(need in done for number in group for need in operators[number].needs)
        done.update(group)
