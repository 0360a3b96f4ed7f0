"""A graph and its rows as calls with their prompts: all that is known of a workflow before it is scheduled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.workflow.analysis.operators import Unrolled, unroll
from weft.workflow.analysis.prefix_tree import PrefixTree, prefix_tree
from weft.workflow.analysis.prompts import TokensOf
from weft.workflow.analysis.row_prompts import RowPrompts, RowValues
from weft.workflow.analysis.statistics import RowValue, Statistics, list_value, row_value
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
    tokens: TokensOf,
) -> AnalysedGraph:
    """Analyse a graph that passed `check` with its rows, or a number of rows whose values are not known. Raises
    `msgspec.ValidationError` for a statistic that does not exist, and the errors of `tokens`."""
    graph = canonical(graph)
    known = Statistics(statistics)
    unrolled = unroll(graph, tokens, known, model, rows)
    tree = prefix_tree([(operator.model, operator.template) for operator in unrolled.operators])
    num_rows = rows if isinstance(rows, int) else len(rows)
    values = _row_values(rows, unrolled, tree, (known, tokens))
    return AnalysedGraph(graph, unrolled, tree, RowPrompts(unrolled, tree, values, num_rows))


def _row_values(
    rows: Sequence[Mapping[str, Any]] | int,
    unrolled: Unrolled,
    tree: PrefixTree,
    given: tuple[Statistics, TokensOf],
) -> RowValues:
    """The inputs and known items that stand in prompts. Models that share a tokenizer count each value once."""
    known, tokens = given
    models = dict.fromkeys(operator.model for operator in unrolled.operators)
    numbers = dict.fromkeys(node.placeholder for node in tree.nodes if node.placeholder is not None)
    used = {number: unrolled.placeholders[number] for number in numbers}
    names = dict.fromkeys(placeholder.name for placeholder in used.values() if placeholder.tokens is None)
    counted: dict[int, Mapping[str | int, RowValue]] = {}
    for model in models:
        counter = tokens(model)
        if id(counter) not in counted:
            values: dict[str | int, RowValue] = {}
            for name in names:
                if isinstance(rows, int):
                    values[name] = known.input_value(name, rows)
                else:
                    values[name] = row_value([row[name] for row in rows], counter.count)
            for number, placeholder in used.items():
                if placeholder.lists is not None:
                    values[number] = list_value(placeholder.lists, counter.count)
            counted[id(counter)] = values
    return {model: counted[id(tokens(model))] for model in models}
