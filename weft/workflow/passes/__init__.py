"""The optimiser: passes that rewrite a graph into a cheaper one with the same outputs.

One pass a file; `PASSES` is their order. They run in rounds until nothing changes, because what one leaves behind is
work for another: a folded text makes two calls equal, and a merged call leaves a node that nothing needs.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.workflow.graph.names import with_unique_names
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.passes.base import (
    CachedResult,
    GraphPass,
    Lookup,
    OperatorCall,
    PassReport,
    PassResult,
    combined,
    nothing_cached,
)
from weft.workflow.passes.fold_constants import fold_constants
from weft.workflow.passes.merge_duplicates import merge_duplicates
from weft.workflow.passes.prune import prune
from weft.workflow.passes.push_slices import push_slices
from weft.workflow.passes.substitute_cached import operator_call, substitute_cached

PASSES: tuple[GraphPass, ...] = (prune, merge_duplicates, substitute_cached, fold_constants, push_slices)
MAX_ROUNDS = 20
"""A bound of time; every graph of the tests needs fewer."""


class OptimisedGraph(NamedTuple):
    """What the passes made of a graph."""

    graph: WorkflowGraph
    reports: tuple[PassReport, ...]
    """One for each pass, in order."""


def optimise(graph: WorkflowGraph, lookup: Lookup = nothing_cached) -> OptimisedGraph:
    """Run the passes on a canonical graph. `lookup` is asked for the results of calls whose inputs are constants. Names
    become unique first; an id that stands once stays. Each id is reported by the first pass that removed it."""
    graph = with_unique_names(graph)
    reports = [PassReport(each.__name__, (), ()) for each in PASSES]
    reported: set[str] = set()
    for _ in range(MAX_ROUNDS):
        before = graph
        for number, each in enumerate(PASSES):
            graph, removed, merged = each(graph, lookup)
            report = reports[number]
            new = tuple(name for name in removed if name not in reported)
            # What a pass made a constant of is still there, and may be merged later: it is reported once.
            merged = tuple(group for group in (_unreported(names, reported) for names in merged) if len(group) > 1)
            reported |= {*removed, *(name for _, *gone in merged for name in gone)}
            reports[number] = report._replace(removed=report.removed + new, merged=combined(report.merged, merged))
        if graph == before:
            break
    return OptimisedGraph(graph, tuple(reports))


def _unreported(group: tuple[str, ...], reported: set[str]) -> tuple[str, ...]:
    kept, *gone = group
    return kept, *(name for name in gone if name not in reported)


__all__ = [
    "PASSES",
    "CachedResult",
    "GraphPass",
    "Lookup",
    "OperatorCall",
    "OptimisedGraph",
    "PassReport",
    "PassResult",
    "fold_constants",
    "merge_duplicates",
    "nothing_cached",
    "operator_call",
    "optimise",
    "prune",
    "push_slices",
    "substitute_cached",
]
