"""All passes together, on random graphs: the optimised graph gives what the graph gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.workflow.naive import NaiveRunner, normalized
from tests.workflow.random_graphs import graphs
from tests.workflow.shapes import graph, text
from weft.workflow.graph import WorkflowGraph, canonical, check, graph_from_dict
from weft.workflow.graph.names import all_nodes, with_unique_names
from weft.workflow.graph.values import RowError
from weft.workflow.passes import PASSES, GraphPass, optimise
from weft.workflow.passes.base import nothing_cached

ROWS = [{"question": "x", "document": "y. x"}, {"question": "", "document": "{{braces}} a. b"}]


def same_outputs(before: WorkflowGraph, after: WorkflowGraph, row: dict[str, Any]) -> None:
    """What can be computed before is computed after, with no more calls. An error may vanish with what nothing needs;
    none appears."""
    first, second = NaiveRunner(), NaiveRunner()
    try:
        expected = normalized(first.run(before, row))
    except RowError:
        return
    assert normalized(second.run(after, row)) == expected
    assert len(second.calls) <= len(first.calls)


def valid(made: WorkflowGraph) -> None:
    assert check(made) == []
    assert canonical(made) == made
    assert with_unique_names(made) == made


@settings(deadline=None, max_examples=40)
@given(graphs(), st.sampled_from(ROWS))
@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.__name__)
def test_a_pass_keeps_the_outputs(each: GraphPass, raw: dict[str, Any], row: dict[str, Any]) -> None:
    before = with_unique_names(graph_from_dict(raw))
    after = each(before, nothing_cached).graph
    valid(after)
    same_outputs(before, after, row)


@settings(deadline=None, max_examples=40)
@given(graphs(), st.sampled_from(ROWS))
def test_all_passes_keep_the_outputs(raw: dict[str, Any], row: dict[str, Any]) -> None:
    before = graph_from_dict(raw)
    made = optimise(before)
    valid(made.graph)
    same_outputs(before, made.graph, row)
    assert optimise(made.graph).graph == made.graph


FOLDED_THEN_MERGED = graph(
    text("n0", "{{q}}"),
    {"id": "n1", "op": "data", "value": "{{braces}}"},
    text("n2", "{{n1}}"),
    outputs={name: name for name in ("n0", "n1", "n2")},
)


@settings(deadline=None, max_examples=40)
@given(graphs())
@example(FOLDED_THEN_MERGED)
def test_reports_say_where_every_node_went(raw: dict[str, Any]) -> None:
    before = with_unique_names(graph_from_dict(raw))
    made = optimise(before)
    after = {node.id: node.op for node in all_nodes(made.graph.nodes)}
    removed = [name for report in made.reports for name in report.removed]
    gone = [name for report in made.reports for _, *names in report.merged for name in names]
    assert len({*removed, *gone}) == len(removed) + len(gone)
    for node in all_nodes(before.nodes):
        assert (after.get(node.id) == node.op) != (node.id in removed or node.id in gone)
