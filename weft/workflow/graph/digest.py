"""One form and one digest of a graph, however it was written: the order of nodes, their ids and the way in which a
reference is spelled make no difference. Inputs, outputs and what a loop binds keep their names."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from weft.workflow.graph.nodes import (
    AnyNode,
    Body,
    GraphNode,
    LoopNode,
    MapNode,
    WorkflowGraph,
    map_strings,
    reference_of,
    uses,
    with_references,
)
from weft.workflow.graph.templates import Reference, parse_reference, parse_template

Rename = Callable[[Reference], Reference]
_EMPTY = Body(nodes=(), outputs={})


def free_references(node: GraphNode) -> tuple[Reference, ...]:
    """What a node needs from around it, in order: its own references, then what its bodies leave unresolved."""
    found = [use.reference for use in uses(node)]
    for _, body in sorted(node.bodies.items()):
        inside = {inner.id for inner in body.nodes} | set(node.bound)
        wanted = [reference for inner in body.nodes for reference in free_references(inner)]
        wanted += goals(body.outputs, node)
        found += [reference for reference in wanted if reference.name not in inside]
    return tuple(found)


class Asked(NamedTuple):
    """What the evaluation of a node asks for around it; what only cases of a switch need is not among it."""

    always: tuple[Reference, ...]
    """Whatever the values are."""
    by_items: tuple[Reference, ...] = ()
    """Where lists of maps are not empty."""
    inside: frozenset[str] = frozenset()
    """The nodes of its body that are evaluated for one or the other, where it is a map or a loop."""


def asked_around(node: GraphNode) -> Asked:
    """What a node asks for: its own references, and what each item of a map or each round of a loop needs."""
    always, by_items = [use.reference for use in uses(node)], list[Reference]()
    if not isinstance(node, (MapNode, LoopNode)):
        return Asked(tuple(always))
    by_id = {inner.id: inner for inner in node.body.nodes}
    known: dict[str, Asked] = {}
    seen: set[tuple[str, bool]] = set()
    pending = deque((reference, isinstance(node, LoopNode)) for reference in goals(node.body.outputs, node))
    while pending:
        reference, is_always = pending.popleft()
        name = reference.name
        if name not in by_id:
            if name not in node.bound:
                (always if is_always else by_items).append(reference)
        elif (name, is_always) not in seen:
            seen.add((name, is_always))
            known[name] = inner = known.get(name) or asked_around(by_id[name])
            pending += ((each, is_always) for each in inner.always)
            pending += ((each, False) for each in inner.by_items)
    return Asked(tuple(always), tuple(by_items), frozenset(known))


def dependencies(nodes: Iterable[GraphNode]) -> dict[str, tuple[str, ...]]:
    """By id, the ids among these nodes that each one needs directly, without repetition, in order of use."""
    nodes = list(nodes)
    ids = {node.id for node in nodes}
    return {
        node.id: tuple(dict.fromkeys(ref.name for ref in free_references(node) if ref.name in ids)) for node in nodes
    }


def goals(outputs: Mapping[str, str], node: GraphNode | None = None) -> list[Reference]:
    """What a graph, or a body of `node`, is computed for: its outputs by name, and what ends a loop. Texts that are no
    reference, which the check refuses, are left out."""
    until = [node.until] if isinstance(node, LoopNode) and node.until is not None else []
    found = (parse_reference(text) for text in [*(outputs[name] for name in sorted(outputs)), *until])
    return [reference for reference in found if reference is not None]


def canonical(graph: WorkflowGraph, around: Mapping[str, GraphNode] | None = None) -> WorkflowGraph:
    """The same graph with its nodes in the one order that follows from its outputs, and with the output named in every
    reference to a node that has outputs. The graph must have passed `check`. `around` are nodes of an earlier graph
    that inputs of this one mean."""
    body = _canonical_body(Body(nodes=graph.nodes, outputs=graph.outputs), None, around or {})
    return WorkflowGraph(inputs=graph.inputs, nodes=body.nodes, outputs=body.outputs)


def digest(graph: WorkflowGraph) -> str:
    """64 hexadecimal digits; equal for graphs that differ in ids and order alone."""
    graph = canonical(graph)
    shape = _body_shape(Body(nodes=graph.nodes, outputs=graph.outputs), None, lambda reference: reference, 0)
    return _hash({"version": graph.version, "inputs": sorted(graph.inputs), **shape})


def journal_digest(graph: WorkflowGraph) -> str:
    """64 hexadecimal digits; equal for graphs that differ in the order of nodes alone. Journals keep values by ids."""
    return _hash({"inputs": sorted(graph.inputs), "nodes": _by_id(graph.nodes), "outputs": graph.outputs})


def rows_digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """Of the rows that a graph runs over, in their order."""
    hashed = hashlib.sha256()
    for row in rows:
        hashed.update(msgspec.json.encode(row, order="deterministic"))
    return hashed.hexdigest()


def node_digest(node: GraphNode, name: Rename) -> str:
    """The digest of a node without its id, where `name` names what it refers to around it."""
    return _hash(_shape(node, name, 0))


class _Level:
    """A graph or a body while its nodes come into canonical order; nodes around a body are canonical before it."""

    def __init__(self, owner: GraphNode | None = None, around: _Level | None = None):
        self.nodes: dict[str, AnyNode] = {}
        """Those that are canonical, each after what it needs."""
        self._owner = owner
        self._around = around
        self._digests: dict[str, str] = {}

    def name(self, name: str) -> str:
        """A name made of what a value is, not of its id."""
        if name in self.nodes and name not in self._digests:
            for node in list(self.nodes.values())[len(self._digests) :]:
                self._digests[node.id] = node_digest(node, lambda ref: ref._replace(name=self.name(ref.name)))
        if name in self._digests:
            return self._digests[name]
        if self._owner is not None and name in self._owner.bound:
            return "#item" if isinstance(self._owner, MapNode) else name
        return name if self._around is None else self._around.name(name)


def _canonical_body(
    body: Body, owner: GraphNode | None, outer: Mapping[str, GraphNode | None], around: _Level | None = None
) -> Body:
    """`outer` has the names around the body; None for those that are no node."""
    scope = inner_scope(body, owner, outer)
    level = _Level(owner, around)
    for node in _in_order(body.nodes, ()):
        bodies = {place: _canonical_body(inner, node, scope, level) for place, inner in node.bodies.items()}
        changed: GraphNode = node.with_bodies(bodies)
        if isinstance(node, LoopNode) and isinstance(changed, LoopNode) and node.until is not None:
            inside = inner_scope(node.body, node, scope)
            changed = replace(changed, until=str(_explicit(reference_of(node.until), inside)))
        level.nodes[node.id] = cast(AnyNode, with_references(changed, lambda reference: _explicit(reference, scope)))
    outputs = {name: str(_explicit(reference_of(body.outputs[name]), scope)) for name in body.outputs}
    return Body(nodes=tuple(_in_order(level.nodes.values(), goals(outputs, owner), level.name)), outputs=outputs)


def inner_scope(
    body: Body, owner: GraphNode | None, outer: Mapping[str, GraphNode | None]
) -> dict[str, GraphNode | None]:
    """What names mean in a body: its nodes, then what `owner` binds, then the names outside."""
    bound = owner.bound if owner is not None else ()
    return {**outer, **dict.fromkeys(bound), **{node.id: node for node in body.nodes}}


def _explicit(reference: Reference, scope: Mapping[str, GraphNode | None]) -> Reference:
    target = scope.get(reference.name)
    if target is None or reference.path or not target.bodies:
        return reference
    body = next(iter(target.bodies.values()))
    return reference._replace(path=(next(iter(body.outputs)),))


def _in_order(
    nodes: Iterable[AnyNode], wanted: Iterable[Reference], name_of: Callable[[str], str] = str
) -> list[AnyNode]:
    """Nodes after what they need: first those that `wanted` needs, in order of use, then the others by the names that
    `name_of` gives."""
    by_id = {node.id: node for node in nodes}
    needs = dependencies(by_id.values())
    order: dict[str, None] = {}
    for reference in wanted:
        if reference.name in by_id:
            _visit(reference.name, needs, order)
    unused = [name for name in by_id if name not in order]
    needed = {name for node in unused for name in needs[node]}
    ends = [name for name in unused if name not in needed]
    if len(ends) > 1:
        ends.sort(key=lambda name: (name_of(name), name))
    for name in ends:
        _visit(name, needs, order)
    return [by_id[name] for name in order]


def _visit(start: str, needs: Mapping[str, tuple[str, ...]], order: dict[str, None]) -> None:
    """Append a node after all that it needs. Chains may be longer than Python's stack."""
    waiting = [(start, iter(needs[start]))]
    while waiting:
        name, rest = waiting[-1]
        following = next((need for need in rest if need not in order), None)
        if following is None:
            order.setdefault(name)
            waiting.pop()
        else:
            waiting.append((following, iter(needs[following])))


def _body_shape(body: Body, owner: GraphNode | None, outer: Rename, depth: int) -> dict[str, Any]:
    """A body in canonical order as JSON, its nodes named by their numbers."""
    numbers = {node.id: f"#{depth}.{number}" for number, node in enumerate(body.nodes)}

    def name(reference: Reference) -> Reference:
        number = numbers.get(reference.name)
        return outer(reference) if number is None else reference._replace(name=number)

    shape: dict[str, Any] = {
        "nodes": [_shape(node, name, depth) for node in body.nodes],
        "outputs": {output: str(name(reference_of(text))) for output, text in sorted(body.outputs.items())},
    }
    if isinstance(owner, LoopNode) and owner.until is not None:
        shape["until"] = str(name(reference_of(owner.until)))
    return shape


def _shape(node: GraphNode, name: Rename, depth: int) -> dict[str, Any]:
    """A node as JSON without its id, with other names for what it refers to. An item of a map has the same name in
    all graphs; what a loop binds is an output too and keeps its own."""

    def text(value: str) -> Any:
        # The template without parts is the empty text; without parts here it would be the empty list.
        parts = parse_template(value).parts or ("",)
        return [part if isinstance(part, str) else {"": str(name(part))} for part in parts]

    used: list[Any] = []

    def visit(place: str, field: str, value: Any) -> Any:
        used.append([place, str(name(reference_of(value))) if field == "name" else map_strings(value, text)])
        return None if field == "values" else ""

    def inner(reference: Reference) -> Reference:
        if reference.name not in node.bound:
            return name(reference)
        return reference._replace(name=f"#{depth}.{'item' if isinstance(node, MapNode) else reference.name}")

    bare = node.visit(visit).with_bodies(dict.fromkeys(node.bodies, _EMPTY))
    used.sort(key=lambda use: use[0])  # arguments have no order
    plain = {field: value for field, value in msgspec.to_builtins(bare).items() if field not in ("id", "item", "until")}
    bodies = {place: _body_shape(body, node, inner, depth + 1) for place, body in node.bodies.items()}
    return {"node": plain, "uses": used, "bodies": bodies}


def _by_id(nodes: Iterable[GraphNode]) -> dict[str, Any]:
    """Nodes as JSON, the nodes of each body by their ids."""
    return {
        node.id: {
            "node": node.with_bodies(dict.fromkeys(node.bodies, _EMPTY)),
            "bodies": {place: [_by_id(body.nodes), body.outputs] for place, body in node.bodies.items()},
        }
        for node in nodes
    }


def _hash(shape: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(shape, order="deterministic")).hexdigest()
