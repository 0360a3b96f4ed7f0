"""What no output needs is not computed: nodes, outputs of bodies, states of loops.

A workflow is evaluated for its outputs: a program, a function or a value from outside that no output needs is left out
too (Helium section 4, "operator pruning").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from msgspec.structs import replace

from weft.workflow.graph.digest import free_references, goals
from weft.workflow.graph.nodes import AnyNode, Body, GraphNode, LoopNode, WorkflowGraph
from weft.workflow.graph.templates import Reference
from weft.workflow.passes.base import Lookup, PassResult, body_of, nothing_cached, result


def prune(graph: WorkflowGraph, lookup: Lookup = nothing_cached) -> PassResult:
    """Remove what no output needs."""
    nodes = _needed(graph.nodes, goals(graph.outputs))
    return result(graph, replace(body_of(graph), nodes=nodes))


def _needed(nodes: tuple[AnyNode, ...], wanted: Iterable[Reference]) -> tuple[AnyNode, ...]:
    """The nodes that `wanted` needs, without those outputs of theirs that nothing needs."""
    used: dict[str, set[str]] = {}

    def use(reference: Reference) -> None:
        used.setdefault(reference.name, set()).update(reference.path[:1])

    for reference in wanted:
        use(reference)
    kept = []
    for node in reversed(nodes):  # what uses a node comes after it
        if node.id in used:
            narrow = cast(AnyNode, _narrowed(node, used[node.id]))
            kept.append(narrow)
            for reference in free_references(narrow):
                use(reference)
    return tuple(reversed(kept))


def _narrowed(node: GraphNode, used: set[str]) -> GraphNode:
    """A node with these outputs alone, if it has outputs."""
    if isinstance(node, LoopNode):
        return _narrowed_loop(node, used)
    return node.with_bodies({place: _narrowed_body(body, used) for place, body in node.bodies.items()})


def _narrowed_body(body: Body, used: set[str], owner: GraphNode | None = None) -> Body:
    outputs = {name: text for name, text in body.outputs.items() if name in used}
    return Body(nodes=_needed(body.nodes, goals(outputs, owner)), outputs=outputs)


def _narrowed_loop(node: LoopNode, used: set[str]) -> GraphNode:
    """A state is needed if it is used after the loop, by its end, or by what makes a needed one in the next round."""
    while True:
        body = _narrowed_body(node.body, used, node)
        wanted = [*goals(body.outputs, node), *(found for inner in body.nodes for found in free_references(inner))]
        states = {reference.name for reference in wanted if reference.name in node.init}
        if states <= used:
            return replace(node, init={name: text for name, text in node.init.items() if name in used}, body=body)
        used = used | states
