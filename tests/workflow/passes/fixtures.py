"""Graphs before and after a pass, executed both ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.workflow.naive import NaiveRunner, normalized
from tests.workflow.shapes import Json
from weft.workflow.graph import WorkflowGraph, canonical, check, graph_from_dict, graph_to_dict
from weft.workflow.graph.names import with_unique_names
from weft.workflow.graph.values import RowError
from weft.workflow.passes import GraphPass, Lookup, nothing_cached

EXTERNALS = {"a": "said a", "b": "said b", "dead": ""}
ROWS: tuple[Json, ...] = ({"q": "x, y, z"}, {"q": "{{q}} \\{{q}}"}, {"q": ""})


def rewrites(
    each: GraphPass,
    before: Json,
    after: Json,
    *,
    removed: Iterable[str] = (),
    merged: Iterable[Iterable[str]] = (),
    lookup: Lookup = nothing_cached,
) -> None:
    """A pass makes this of a graph, reports it so, and both give the same."""
    first = with_unique_names(graph_from_dict(before))
    made = each(first, lookup)
    assert graph_to_dict(made.graph) == graph_to_dict(graph_from_dict(after))
    assert list(made.removed) == list(removed)
    assert [list(group) for group in made.merged] == [list(group) for group in merged]
    is_valid(made.graph)
    ran = [gives_the_same(first, made.graph, row) for row in ROWS]
    assert any(ran), "no row of the fixture gets through"


def leaves(each: GraphPass, before: Json, *, lookup: Lookup = nothing_cached) -> None:
    """A pass finds nothing to do."""
    rewrites(each, before, before, lookup=lookup)


def is_valid(made: WorkflowGraph) -> None:
    """What a pass returns is what a pass takes."""
    assert check(made) == []
    assert canonical(made) == made
    assert with_unique_names(made) == made


def gives_the_same(before: WorkflowGraph, after: WorkflowGraph, row: dict[str, Any]) -> bool:
    """What can be computed before is computed after, with no more calls; whether it could be computed. An error may
    vanish with what nothing needs; none appears."""
    first, second = NaiveRunner(externals=EXTERNALS), NaiveRunner(externals=EXTERNALS)
    try:
        expected = normalized(first.run(before, row))
    except RowError:
        return False
    assert normalized(second.run(after, row)) == expected
    assert len(second.calls) <= len(first.calls)
    return True
