"""A slice of what a map makes becomes a map over the slice, where nothing else needs the map: items outside the slice
are not computed. An error that one of them would have made vanishes; that of a list longer than `max_items` stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

from msgspec.structs import replace

from weft.workflow.graph.names import NameTable, all_nodes
from weft.workflow.graph.nodes import (
    MAX_ITEMS,
    AnyNode,
    Body,
    GraphNode,
    LoopNode,
    MapNode,
    PickNode,
    WorkflowGraph,
    reference_of,
    uses,
)
from weft.workflow.graph.templates import Reference
from weft.workflow.passes.base import Lookup, PassResult, body_of, nothing_cached, redirected, result


def push_slices(graph: WorkflowGraph, lookup: Lookup = nothing_cached) -> PassResult:
    """Push slices to a fixpoint: through maps over maps too."""
    now = PassResult(graph)
    while slices := _pushable(now.graph):
        names = NameTable()
        names.used = {*graph.inputs, *(name for node in all_nodes(now.graph.nodes) for name in (node.id, *node.bound))}
        moved = {pick.id: reference_of(pick.of) for picks in slices.values() for pick in picks}

        def new(reference: Reference, moved: Mapping[str, Reference] = moved) -> Reference:
            return moved.get(reference.name, reference)

        body = _pushed(body_of(now.graph), slices, names)
        now = result(graph, redirected(body, new))
    return now


def _pushable(graph: WorkflowGraph) -> dict[str, list[PickNode]]:
    """By the id of a map, the nodes that take the same slice of it, where nothing else uses it. A slice whose bound is
    lower than the map's stays where it is: its error may be in a case of a switch that is not taken."""
    every = list(all_nodes(graph.nodes))
    users: dict[str, list[GraphNode | None]] = defaultdict(list)
    bodies = [body_of(graph), *(body for node in every for body in node.bodies.values())]
    kept = [text for body in bodies for text in body.outputs.values()]
    kept += [node.until for node in every if isinstance(node, LoopNode) and node.until is not None]
    for text in kept:
        users[reference_of(text).name].append(None)
    for node in every:
        for use in uses(node):
            users[use.reference.name].append(node)
    found = {}
    for node in every:
        picks = [user for user in users[node.id] if isinstance(user, PickNode) and user.slice is not None]
        same = len(picks) == len(users[node.id]) and len({pick.slice for pick in picks}) == 1
        if isinstance(node, MapNode) and same and all(_bound(pick) >= node.max_items for pick in picks):
            found[node.id] = picks
    return found


def _bound(pick: PickNode) -> int:
    return MAX_ITEMS if pick.max_items is None else pick.max_items


def _pushed(body: Body, slices: Mapping[str, list[PickNode]], names: NameTable) -> Body:
    gone = {pick.id for picks in slices.values() for pick in picks}
    nodes: list[AnyNode] = []
    for node in body.nodes:
        if node.id in gone:
            continue
        if isinstance(node, MapNode) and node.id in slices:
            part = slices[node.id][0].slice
            over = names.take(f"{node.id}_over")
            nodes.append(PickNode(id=over, of=node.over, slice=part, max_items=node.max_items))
            node = replace(node, over=over)
        inner = {place: _pushed(inside, slices, names) for place, inside in node.bodies.items()}
        nodes.append(cast(AnyNode, node.with_bodies(inner)))
    return replace(body, nodes=tuple(nodes))
