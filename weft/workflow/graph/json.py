"""Graphs as JSON: `{"version": 1, "inputs": [...], "nodes": [...], "outputs": {...}}`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast, get_type_hints

import msgspec
from msgspec.structs import replace

from weft.endpoints.fields import with_allowed
from weft.workflow.graph.check import MAX_DEPTH, check, checked_types, too_large
from weft.workflow.graph.digest import canonical, free_references
from weft.workflow.graph.mistakes import InvalidGraph, Mistake, nearest
from weft.workflow.graph.node_checks import CALL_FIELDS
from weft.workflow.graph.nodes import (
    MAX_NODES,
    NODES,
    VERSION,
    AnyNode,
    Body,
    DataNode,
    GraphNode,
    LlmNode,
    WorkflowGraph,
)
from weft.workflow.graph.value_types import ValueType


def graph_from_json(text: str | bytes) -> WorkflowGraph:
    """Read a graph. Raises `InvalidGraph` with every mistake and its place."""
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidGraph([Mistake("", f"not JSON: {error}")]) from None
    return graph_from_dict(raw)


def graph_from_dict(raw: Any) -> WorkflowGraph:
    """Convert and check decoded JSON; the result is canonical. Raises `InvalidGraph` with every mistake and its
    place."""
    reader = _Reader()
    graph = reader.graph(raw)
    mistakes = reader.mistakes + (check(graph, known=reader.unread) if graph is not None else [])
    if mistakes or graph is None:
        raise InvalidGraph(mistakes)
    return canonical(graph)


def growth_from_list(
    raw: Any, types: Mapping[str, ValueType], around: Mapping[str, GraphNode]
) -> tuple[tuple[AnyNode, ...], Mapping[str, ValueType]]:
    """Convert and check decoded JSON of nodes that are added to a graph whose names have these types and are these
    nodes. Returns the nodes, canonical, and types of names, theirs among them. Raises `InvalidGraph` with every mistake
    and its place."""
    reader = _Reader()
    graph = reader.graph({"version": VERSION, "nodes": raw})
    if graph is None:
        raise InvalidGraph(reader.mistakes)
    large = too_large(graph.nodes)
    if large:
        raise InvalidGraph([*reader.mistakes, *large])
    used = {reference.name for node in graph.nodes for reference in free_references(node)}
    inputs = {name: types[name] for name in sorted(used) if name in types}
    outputs = {f"output_{number}": node.id for number, node in enumerate(graph.nodes)}
    graph = replace(graph, inputs=tuple(inputs), outputs=outputs)
    mistakes, found = checked_types(graph, known=reader.unread, inputs=inputs)
    # Which of several outputs of a node is meant is said by those who use it.
    mistakes = [each for each in mistakes if each.place.partition(".")[0] != "outputs"]
    mistakes += [Mistake(node.id, "is used in this session already") for node in graph.nodes if node.id in types]
    if reader.mistakes or mistakes:
        raise InvalidGraph([*reader.mistakes, *mistakes])
    return canonical(graph, around).nodes, found


def graph_to_dict(graph: WorkflowGraph) -> dict[str, Any]:
    """The JSON form. `graph_from_dict` makes an equal graph of it."""
    outer = {"version": graph.version, "inputs": list(graph.inputs)}
    return {**outer, **_body_to_dict(Body(nodes=graph.nodes, outputs=graph.outputs))}


def _body_to_dict(body: Body) -> dict[str, Any]:
    return {"nodes": [node_to_dict(node) for node in body.nodes], "outputs": dict(body.outputs)}


def node_to_dict(node: GraphNode) -> dict[str, Any]:
    """A node as it stands in JSON; defaults are left out."""
    own: dict[str, Any] = msgspec.to_builtins(node)
    request = own.pop("request", {})
    own = {"id": own.pop("id"), **own, **request}
    if not node.bodies:
        return own
    bodies = {place: _body_to_dict(body) for place, body in node.bodies.items()}
    if "cases" in own:
        own["cases"] = {name: bodies[f"cases[{name}]"] for name in own["cases"]}
    return own | {place: body for place, body in bodies.items() if not place.startswith("cases[")}


class _Reader:
    """Converts JSON to nodes and collects what cannot be converted."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self.unread: set[str] = set()
        """Ids of nodes that could not be converted."""
        self._count = 0

    def graph(self, raw: Any) -> WorkflowGraph | None:
        """The graph, without the nodes that could not be converted; None where there is nothing to check."""
        if not isinstance(raw, dict):
            self._add("", "a workflow must be a JSON object with version, inputs, nodes and outputs")
            return None
        if raw.get("version") != VERSION or raw["version"] is True:
            self._add("version", f"must be {VERSION}, not {str(raw.get('version'))[:50]}")
            return None
        self._unknown(raw, WorkflowGraph.__struct_fields__, "")
        inputs = self._convert(raw.get("inputs", []), _hints(WorkflowGraph)["inputs"], "inputs")
        body = self._body({name: raw[name] for name in Body.__struct_fields__ if name in raw}, "", 0)
        if body is None:
            return None
        return WorkflowGraph(inputs=inputs or (), nodes=body.nodes, outputs=body.outputs)

    def _body(self, raw: Any, prefix: str, depth: int) -> Body | None:
        if not isinstance(raw, dict) or not isinstance(raw.get("nodes"), list):
            self._add(prefix.rstrip("."), "must be an object with nodes, a list, and outputs")
            return None
        if depth > MAX_DEPTH:
            self._add(prefix.rstrip("."), f"bodies may be nested {MAX_DEPTH} deep")
            return None
        self._unknown(raw, Body.__struct_fields__, prefix)
        self._count += len(raw["nodes"])
        if self._count > MAX_NODES:
            self._add(f"{prefix}nodes", f"there are more than {MAX_NODES:,} nodes, bodies included")
            return None
        nodes = [self._node(each, number, prefix, depth) for number, each in enumerate(raw["nodes"])]
        outputs = self._convert(raw.get("outputs", {}), _hints(Body)["outputs"], f"{prefix}outputs")
        return Body(nodes=tuple(node for node in nodes if node is not None), outputs=outputs or {})

    def _node(self, raw: Any, number: int, prefix: str, depth: int) -> AnyNode | None:
        place = f"{prefix}nodes[{number}]"
        if not isinstance(raw, dict):
            self._add(place, "a node must be an object with an id and an op")
            return None
        node_id, op = raw.get("id"), raw.get("op")
        if isinstance(node_id, str):
            place = f"{prefix}{node_id[:100]}"
        before = len(self.mistakes)
        kind = NODES.get(op) if isinstance(op, str) else None
        if kind is None:
            near = nearest(str(op), NODES) or f" There are {', '.join(NODES)}."
            self._add(f"{place}.op", f"there is no operator {str(op)[:50]!r}.{near}")
        else:
            fields = self._fields(raw, kind, place, depth)
            if len(self.mistakes) == before:
                return cast(AnyNode, kind(**fields))
        if isinstance(node_id, str):
            self.unread.add(node_id)
        return None

    def _fields(self, raw: dict[str, Any], kind: type[GraphNode], place: str, depth: int) -> dict[str, Any]:
        """The fields of a node's class, each converted by itself, so that every mistake is found."""
        hints = _hints(kind)
        known = _known(kind)
        fields: dict[str, Any] = {}
        request: dict[str, Any] = {}
        for name, value in raw.items():
            at = f"{place}.{name[:100]}"
            if name == "op" or (value is None and name in known and kind is not DataNode):
                continue
            if name in hints:
                fields[name] = self._field(name, value, hints[name], at, depth)
            elif kind is LlmNode and name != "request" and value is not None:
                request[name] = value
            else:
                self._add(at, f"{raw['op']} has no such field.{nearest(name, known)}")
        if kind is LlmNode:
            fields["request"] = request
        for required in _required(kind):
            if required not in fields:
                self._add(f"{place}.{required}", "is required")
        return fields

    def _field(self, name: str, value: Any, hint: Any, at: str, depth: int) -> Any:
        if name in ("body", "default"):
            return self._body(value, f"{at}.", depth + 1)
        if name != "cases":
            return self._convert(value, hint, at)
        if not isinstance(value, dict):
            self._add(at, "must be an object with a graph for each value")
            return {}
        return {case: self._body(body, f"{at}[{case[:64]}].", depth + 1) for case, body in value.items()}

    def _convert(self, value: Any, hint: Any, at: str) -> Any:
        try:
            return msgspec.convert(value, hint)
        except (msgspec.ValidationError, RecursionError) as error:
            what, _, where = str(error).partition(" - at ")
            inner = where.strip("`").removeprefix("$")
            self._add(f"{at}{inner}", with_allowed(what.replace("`", "'"), hint, inner.removeprefix(".")))
            return None

    def _unknown(self, raw: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
        for name in raw:
            if name not in known:
                self._add(f"{prefix}{name[:100]}", f"there is no such field.{nearest(name, known)}")

    def _add(self, place: str, message: str) -> None:
        self.mistakes.append(Mistake(place, message))


@functools.cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of the fields that stand in JSON."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__ if name != "request"}


@functools.cache
def _known(kind: type[GraphNode]) -> frozenset[str]:
    return frozenset(_hints(kind)) | (CALL_FIELDS if kind is LlmNode else frozenset())


@functools.cache
def _required(kind: type[GraphNode]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.required)
