"""A plan: what is known of a workflow's run before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.workflow.analysis.operators import Unrolled, unroll
from weft.workflow.analysis.prefix_tree import PrefixTree, prefix_tree
from weft.workflow.analysis.prompts import PromptTokens
from weft.workflow.analysis.row_prompts import RowPrompts
from weft.workflow.analysis.statistics import Statistics, row_value
from weft.workflow.graph import WorkflowGraph, canonical


class AnalysedGraph(NamedTuple):
    """The calls of a workflow for some rows, before they are scheduled."""

    graph: WorkflowGraph
    unrolled: Unrolled
    tree: PrefixTree
    prompts: RowPrompts


def analyse(
    graph: WorkflowGraph,
    rows: Sequence[Mapping[str, Any]] | int,
    model: str,
    statistics: Mapping[str, Any],
    tokens: PromptTokens,
) -> AnalysedGraph:
    """Analyse a graph that passed `check` with its rows, or a number of rows whose values are not known."""
    graph = canonical(graph)
    known = Statistics(statistics)
    unrolled = unroll(graph, tokens, known, model)
    tree = prefix_tree([operator.template for operator in unrolled.operators])
    if isinstance(rows, int):
        num_rows, values = rows, {name: known.input_value(name, rows) for name in graph.inputs}
    else:
        num_rows = len(rows)
        count = lambda text: len(tokens.encode(text))  # noqa: E731
        values = {name: row_value([row[name] for row in rows], count) for name in graph.inputs}
    return AnalysedGraph(graph, unrolled, tree, RowPrompts(unrolled, tree, values, num_rows))
