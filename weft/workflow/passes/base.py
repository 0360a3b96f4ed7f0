"""What all passes share: their form, what they report, and how they rewrite references.

A pass takes a canonical graph whose names are unique and returns another one with the same outputs for every row. What
no output needs is not computed, so an error of it vanishes with it; no pass adds an error or a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from weft.workflow.graph.digest import canonical
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, Body, GraphNode, LoopNode, WorkflowGraph, reference_of, with_references
from weft.workflow.graph.templates import Reference

Rewrite = Callable[[Reference], Reference]


class OperatorCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose inputs are known: what a cache of results is asked for. Tenant, weights and adapter, and the model
    where the call names none, are for the cache to add."""

    op: str
    """`llm` or `function`."""
    fields: Mapping[str, Any]
    """Of a model: every field of the request, its schema, and messages or prompt as text. Of a function: source and
    args."""


class CachedResult(NamedTuple):
    """An answer of a cache to a call: its value."""

    value: Any
    """Of a call of a model the answer's text, of a function its value."""


Lookup = Callable[[OperatorCall], CachedResult | None]


def nothing_cached(call: OperatorCall) -> CachedResult | None:
    """Answer no call: the `Lookup` of a run without prompt cache."""
    return None


class PassResult(NamedTuple):
    """What a pass made of a graph."""

    graph: WorkflowGraph
    removed: tuple[str, ...] = ()
    """Ids of nodes that are not evaluated any more: they are gone, or became constants."""
    merged: tuple[tuple[str, ...], ...] = ()
    """Ids of nodes that became one: the kept one, then those that are gone. A kept one alone: what each round of a loop
    would evaluate is evaluated once, before the loop."""


GraphPass = Callable[[WorkflowGraph, Lookup], PassResult]


class PassReport(NamedTuple):
    """What a pass did in all rounds, as plans show it."""

    name: str
    removed: tuple[str, ...]
    merged: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; `removed` and `merged` are lists of ids of nodes."""
        return {"name": self.name, "removed": list(self.removed), "merged": [list(group) for group in self.merged]}


def body_of(graph: WorkflowGraph) -> Body:
    """Nodes and outputs of a graph."""
    return Body(nodes=graph.nodes, outputs=graph.outputs)


class UnknownValueError(Exception):
    """A value that is not a constant."""


def result(before: WorkflowGraph, body: Body) -> PassResult:
    """The graph with other nodes and outputs, and which nodes that removed."""
    if body.nodes == before.nodes and body.outputs == before.outputs:
        return PassResult(before)
    after = canonical(replace(before, nodes=body.nodes, outputs=body.outputs))
    ops = {node.id: node.op for node in all_nodes(after.nodes)}
    return PassResult(after, tuple(node.id for node in all_nodes(before.nodes) if ops.get(node.id) != node.op))


def redirected(body: Body, new: Rewrite) -> Body:
    """A body whose references are replaced, those in bodies within included."""
    outputs = {name: str(new(reference_of(text))) for name, text in body.outputs.items()}
    return Body(nodes=tuple(cast(AnyNode, _redirected_node(node, new)) for node in body.nodes), outputs=outputs)


def _redirected_node(node: GraphNode, new: Rewrite) -> GraphNode:
    node = with_references(node, new)
    node = node.with_bodies({place: redirected(body, new) for place, body in node.bodies.items()})
    if isinstance(node, LoopNode) and node.until is not None:
        return replace(node, until=str(new(reference_of(node.until))))
    return node


def combined(groups: Iterable[tuple[str, ...]], later: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Groups of merged nodes, and those that were merged after them: a kept node that is gone takes its group along."""
    known = {group[0]: group[1:] for group in groups}
    for kept, *gone in later:
        members = [name for each in gone for name in (each, *known.pop(each, ()))]
        known[kept] = (*known.get(kept, ()), *members)
    return tuple((kept, *gone) for kept, gone in known.items())
