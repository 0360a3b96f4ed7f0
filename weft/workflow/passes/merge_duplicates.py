"""Nodes that compute the same become one (Helium section 4, "common subgraph elimination").

Two nodes compute the same if they are deterministic, have equal fields (`retries` too), and refer to the same values. A
call with `cache` false is left alone: no other call may answer it. A node in a body merges with an equal one around the
body, which is evaluated anyway. Nothing leaves the body of a map or a switch otherwise: the list may be empty and the
case not taken, and then the call would be one more. The body of a loop is evaluated at least once, so what every round
asks for, and is the same in all of them, is evaluated before the loop.
"""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from weft.workflow.graph.determinism import is_deterministic
from weft.workflow.graph.digest import asked_around, free_references, node_digest
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, Body, LlmNode, LoopNode, WorkflowGraph
from weft.workflow.graph.templates import Reference
from weft.workflow.passes.base import (
    Lookup,
    PassResult,
    body_of,
    combined,
    nothing_cached,
    redirected,
    result,
)


def merge_duplicates(graph: WorkflowGraph, lookup: Lookup = nothing_cached) -> PassResult:
    """Merge to a fixpoint: nodes that became equal by a merge within them are merged next."""
    merged: tuple[tuple[str, ...], ...] = ()
    now = PassResult(graph)
    while True:
        merger = _Merger()
        body = redirected(merger.body(body_of(now.graph), {}), merger.kept)
        if not merger.groups:
            gone = {name for group in merged for name in group}
            inner = tuple(name for name in now.removed if name not in gone)
            return PassResult(now.graph, removed=inner, merged=merged)
        merged = combined(merged, [(kept, *gone) for kept, gone in merger.groups.items()])
        now = result(graph, body)


class _Merger:
    """One walk over a graph. References are replaced afterwards."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str]] = {}
        """Kept id -> gone ids; none for a node that left a loop."""
        self._kept: dict[str, str] = {}

    def kept(self, reference: Reference) -> Reference:
        """What a reference means after the merges so far."""
        return reference._replace(name=self._kept.get(reference.name, reference.name))

    def body(self, body: Body, outer: dict[str, str]) -> Body:
        """A body without the duplicates of what it has or can see; `outer` has the digests of nodes around it."""
        seen = dict(outer)
        nodes = [node for node in body.nodes if self._is_first(node, seen)]
        for at, node in enumerate(nodes):
            varying = self._without_invariants(node, nodes, seen)
            bodies = {place: self.body(inner, seen) for place, inner in varying.bodies.items()}
            nodes[at] = cast(AnyNode, varying.with_bodies(bodies))
        return replace(body, nodes=tuple(nodes))

    def _is_first(self, node: AnyNode, seen: dict[str, str]) -> bool:
        if not may_merge(node):
            return True
        kept = seen.setdefault(node_digest(node, self.kept), node.id)
        if kept == node.id:
            return True
        self.groups.setdefault(kept, []).append(node.id)
        self._kept[node.id] = kept
        return False

    def _without_invariants(self, node: AnyNode, around: list[AnyNode], seen: dict[str, str]) -> AnyNode:
        """A loop without the nodes that are the same in every round; they move to `around`."""
        if not isinstance(node, LoopNode):
            return node
        inside = {inner.id for inner in node.body.nodes} | set(node.bound)
        asked = asked_around(node).inside
        stay = []
        for inner in node.body.nodes:
            needs = {reference.name for reference in free_references(inner)}
            if needs & inside or inner.id not in asked or not may_merge(inner):
                stay.append(inner)
                continue
            inside.remove(inner.id)
            if self._is_first(inner, seen):
                around.append(inner)
                self.groups.setdefault(inner.id, [])
        return replace(node, body=replace(node.body, nodes=tuple(stay)))


def may_merge(node: AnyNode) -> bool:
    """Whether one evaluation of a node may stand for those of equal ones."""
    return is_deterministic(node) and all(inner.cache for inner in all_nodes((node,)) if isinstance(inner, LlmNode))
