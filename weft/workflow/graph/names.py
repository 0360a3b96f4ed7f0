"""Names that are used once in a whole graph, bodies included.

A body may hide a name of the graph around it. Once every name is unique, a reference means the same wherever it stands,
so nodes and references can move between bodies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from msgspec.structs import replace

from weft.workflow.graph.digest import canonical
from weft.workflow.graph.nodes import (
    AnyNode,
    Body,
    GraphNode,
    LoopNode,
    MapNode,
    WorkflowGraph,
    reference_of,
    with_references,
)
from weft.workflow.graph.templates import Reference, is_name


class NameTable:
    """The names that a body can refer to: its own, and those around it."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.counts: dict[str, int] = {}

    def take(self, name: str) -> str:
        """The name, or one like it that is free."""
        while name in self.used or not is_name(name):
            stem = name if is_name(name) else "value"
            self.counts[stem] = self.counts.get(stem, 1) + 1
            name = f"{stem.rstrip('0123456789').rstrip('_')}_{self.counts[stem]}"
        self.used.add(name)
        return name


def all_nodes(nodes: tuple[AnyNode, ...]) -> Iterator[AnyNode]:
    """These nodes and those of their bodies, each before those inside it."""
    for node in nodes:
        yield node
        for body in node.bodies.values():
            yield from all_nodes(body.nodes)


def with_unique_names(graph: WorkflowGraph) -> WorkflowGraph:
    """The same graph where every node, input, item and state of a loop has a name of its own; of two that share one,
    the outer keeps it. The graph must be canonical, and the result is."""
    names = list(graph.inputs) + [name for node in all_nodes(graph.nodes) for name in (node.id, *node.bound)]
    if len(set(names)) == len(names):
        return graph
    renamer = _Renamer()
    scope = {name: _NewName(renamer.table.take(name), {}) for name in graph.inputs}
    body, _ = renamer.body(Body(nodes=graph.nodes, outputs=graph.outputs), scope)
    return canonical(replace(graph, nodes=body.nodes, outputs=body.outputs))


class _NewName(NamedTuple):
    """What a name became."""

    name: str
    outputs: Mapping[str, str]
    """Of a loop: what its outputs became, which are called like its states."""


Scope = Mapping[str, _NewName]


class _Renamer:
    """Renames from the outside inwards."""

    def __init__(self) -> None:
        self.table = NameTable()

    def body(self, body: Body, outer: Scope) -> tuple[Body, Scope]:
        """A body with new names, and what its names became."""
        ids = [self.table.take(node.id) for node in body.nodes]
        bound = [{name: self.table.take(name) for name in node.bound} for node in body.nodes]
        scope = dict(outer)
        for node, new_id, names in zip(body.nodes, ids, bound, strict=True):
            scope[node.id] = _NewName(new_id, names if isinstance(node, LoopNode) else {})
        nodes = [
            replace(self._node(node, names, scope), id=new_id)
            for node, new_id, names in zip(body.nodes, ids, bound, strict=True)
        ]
        outputs = {name: _renamed_text(text, scope) for name, text in body.outputs.items()}
        return Body(nodes=tuple(cast(AnyNode, node) for node in nodes), outputs=outputs), scope

    def _node(self, node: GraphNode, bound: Mapping[str, str], scope: Scope) -> GraphNode:
        inner = {**scope, **{name: _NewName(new, {}) for name, new in bound.items()}}
        found = {place: self.body(body, inner) for place, body in node.bodies.items()}
        node = with_references(node, lambda reference: _renamed(reference, scope))
        node = node.with_bodies({place: body for place, (body, _) in found.items()})
        if isinstance(node, MapNode):
            return replace(node, item=bound[node.item])
        if not isinstance(node, LoopNode):
            return node
        return replace(
            node,
            init={bound[name]: value for name, value in node.init.items()},
            body=replace(node.body, outputs={bound[name]: value for name, value in node.body.outputs.items()}),
            until=None if node.until is None else _renamed_text(node.until, found["body"][1]),
        )


def _renamed(reference: Reference, scope: Scope) -> Reference:
    new = scope[reference.name]
    path = reference.path
    return Reference(new.name, (new.outputs.get(path[0], path[0]), *path[1:]) if path else ())


def _renamed_text(text: str, scope: Scope) -> str:
    return str(_renamed(reference_of(text), scope))
