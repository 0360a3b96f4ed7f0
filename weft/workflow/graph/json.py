"""Graphs as JSON: `{"version": 1, "inputs": [...], "nodes": [...], "outputs": {...}}`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from weft.endpoints.fields import is_field, options_of, with_allowed
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.workflow.graph.check import MAX_DEPTH, check, checked_types, too_large
from weft.workflow.graph.digest import canonical, free_references
from weft.workflow.graph.mistakes import InvalidGraph, Mistake, bounded_hints, nearest
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
    PromptMessage,
    WorkflowGraph,
)
from weft.workflow.graph.value_types import ValueType

_MAX_PARTS = 1000
"""Items of one value, and mistakes of a graph, after which a wrong value is one mistake."""
_NO_GRAPH = "must be an object with nodes, a list, and outputs"
_NO_BODY = Body(nodes=(), outputs={})


def graph_from_json(text: str | bytes) -> WorkflowGraph:
    """Read a graph. Raises `InvalidGraph` with every mistake and its place."""
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidGraph([Mistake("", f"not JSON: {error}")]) from None
    return graph_from_dict(raw)


@bounded_hints()
def graph_from_dict(raw: Any) -> WorkflowGraph:
    """Convert and check decoded JSON; the result is canonical. Raises `InvalidGraph` with every mistake and its
    place."""
    reader = _Reader()
    graph = reader.graph(raw)
    mistakes = reader.mistakes + (check(graph, unread=reader.unread) if graph is not None else [])
    if mistakes or graph is None:
        raise InvalidGraph(mistakes)
    return canonical(graph)


@bounded_hints()
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
    mistakes, found = checked_types(graph, unread=reader.unread, inputs=inputs)
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


class _Part(NamedTuple):
    """What is read now: a node, or the graph."""

    prefix: str
    """Of the places of mistakes in it."""
    unread: set[str]
    """Places in it that could not be read."""


class _Reader:
    """Converts JSON to nodes and collects what cannot be converted. What remains of a node is kept for the check."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self.unread: dict[int | None, set[str]] = {}
        """As `check` takes it. Nodes are alive as long as the graph is."""
        self._count = 0

    def graph(self, raw: Any) -> WorkflowGraph | None:
        """The graph, without what could not be converted; None where there is nothing to check."""
        if not isinstance(raw, dict):
            self._add("", "a workflow must be a JSON object with version, inputs, nodes and outputs")
            return None
        version = raw.get("version")
        if version != VERSION or version is True:
            self._add("version", f"must be {VERSION}, not {str(version)[:50]}")
            if isinstance(version, (int, float)):
                return None
        part = _Part("", self.unread.setdefault(None, set()))
        if self._unknown(raw, WorkflowGraph.__struct_fields__, ""):
            part.unread.update({"inputs", "outputs"}.difference(raw))
        given = raw.get("inputs", [])
        inputs = self._convert(given, _hints(WorkflowGraph)["inputs"], "inputs", part)
        if "inputs" not in part.unread:
            inputs = tuple(each for each in given if isinstance(each, str))
        body = self._body({name: raw[name] for name in Body.__struct_fields__ if name in raw}, "", part, 0)
        if body is None:
            return None
        return WorkflowGraph(inputs=inputs, nodes=body.nodes, outputs=body.outputs)

    def _body(self, raw: Any, at: str, part: _Part, depth: int) -> Body | None:
        """The graph at a place in a node; at the place "" that of the whole graph."""
        place = f"{part.prefix}{at[:100]}"
        prefix = f"{place}." if at else ""

        def refuse(where: str, message: str) -> Body | None:
            self._add(where, message)
            part.unread.add(at)
            return None

        if not isinstance(raw, dict):
            return refuse(place, _NO_GRAPH)
        if depth > MAX_DEPTH:
            return refuse(place, f"bodies may be nested {MAX_DEPTH} deep")
        where = f"{at}.outputs".removeprefix(".")
        if self._unknown(raw, Body.__struct_fields__, prefix) and "outputs" not in raw:
            part.unread.add(where)
        given = raw.get("outputs", {})
        outputs = self._convert(given, _hints(Body)["outputs"], where, part)
        if not isinstance(raw.get("nodes"), list):
            return refuse(place, _NO_GRAPH)
        self._count += len(raw["nodes"])
        if self._count > MAX_NODES:
            return refuse(f"{prefix}nodes", f"there are more than {MAX_NODES:,} nodes, bodies included")
        nodes = tuple(self._node(each, number, prefix, depth) for number, each in enumerate(raw["nodes"]))
        return Body(nodes=nodes, outputs={name: text for name, text in outputs.items() if given[name] == text})

    def _node(self, raw: Any, number: int, prefix: str, depth: int) -> AnyNode:
        """A node, with defaults and empty values for what could not be converted."""
        name = f"nodes[{number}]"
        if not isinstance(raw, dict):
            self._add(f"{prefix}{name}", "a node must be an object with an id and an op")
            return self._kept(DataNode(id=name, value=None), {"id", "value"})
        if isinstance(raw.get("id"), str):
            name = raw["id"]
        part = _Part(f"{prefix}{name[:100]}.", set())
        op = raw.get("op")
        kind = NODES.get(op) if isinstance(op, str) else None
        if kind is None:
            near = nearest(str(op), NODES) or f" There are {', '.join(NODES)}."
            self._add(f"{part.prefix}op", f"there is no operator {str(op)[:50]!r}.{near}")
            part.unread.add("value")
            raw, kind = {"value": None} | {name: raw[name] for name in ("id",) if name in raw}, DataNode
        return self._kept(cast(AnyNode, kind(**{**self._fields(raw, kind, part, depth), "id": name})), part.unread)

    def _kept(self, node: AnyNode, unread: set[str]) -> AnyNode:
        if unread:
            self.unread[id(node)] = unread
        return node

    def _fields(self, raw: dict[str, Any], kind: type[GraphNode], part: _Part, depth: int) -> dict[str, Any]:
        """The fields of a node's class, each converted by itself, so that every mistake is found."""
        hints = _hints(kind)
        known = _known(kind)
        given = {
            name: value
            for name, value in raw.items()
            if name != "op" and (value is not None or name not in known or kind is DataNode)
        }
        fields: dict[str, Any] = {}
        request: dict[str, Any] = {}
        is_misspelt = False
        for name, value in given.items():
            if name in hints:
                made = self._field(name, value, hints[name], part, depth)
                if made is not None or name in _required(kind):
                    fields[name] = made
            elif kind is LlmNode and name != "request" and value is not None:
                request[name] = value
                is_misspelt |= not is_field(ChatRequest, name) and not is_field(CompletionRequest, name)
            else:
                self._add(f"{part.prefix}{name[:100]}", f"{raw['op']} has no such field.{nearest(name, known)}")
                is_misspelt = True
        for required in _required(kind):
            if required not in given:
                self._add(f"{part.prefix}{required}", "is required")
                part.unread.add(required)
                fields[required] = _empty(hints[required])
        if is_misspelt:
            part.unread.update(set(hints) - set(given))
        if kind is LlmNode:
            fields["request"] = request
            if "messages" in part.unread and "prompt" not in given:
                fields.setdefault("messages", ())
        return fields

    def _field(self, name: str, value: Any, hint: Any, part: _Part, depth: int) -> Any:
        if name in ("body", "default"):
            return self._body(value, name, part, depth + 1) or _NO_BODY
        if name != "cases":
            return self._convert(value, hint, name, part)
        if not isinstance(value, dict):
            self._add(f"{part.prefix}{name}", "must be an object with a graph for each value")
            part.unread.add(name)
            return {}
        bodies = {case: self._body(body, f"cases[{case}]", part, depth + 1) for case, body in value.items()}
        return {case: body or _NO_BODY for case, body in bodies.items()}

    def _convert(self, value: Any, hint: Any, at: str, part: _Part) -> Any:
        """The value, with something empty for each part of it that could not be converted."""
        try:
            return msgspec.convert(value, hint)
        except (msgspec.ValidationError, RecursionError) as error:
            before = len(self.mistakes)
            made = self._parts(value, hint, at, part) if before < _MAX_PARTS else None
            if len(self.mistakes) > before:
                return made
            what, _, where = str(error).partition(" - at ")
            inner = where.strip("`").removeprefix("$")
            message = with_allowed(what.replace("`", "'"), hint, inner.removeprefix("."))
            self._add(f"{part.prefix}{at[:100]}{inner}", message)
            part.unread.add(at)
            return _empty(hint)

    def _parts(self, value: Any, hint: Any, at: str, part: _Part) -> Any:
        """Convert the items or fields of a value by themselves. None for a value that has none."""
        for option in options_of(hint):
            args = get_args(option)
            if isinstance(value, dict) and get_origin(option) is dict:
                items = list(itertools.islice(value.items(), _MAX_PARTS))
                return {name: self._convert(inner, args[1], f"{at}.{name}", part) for name, inner in items}
            if isinstance(value, (list, tuple)) and get_origin(option) is tuple and ... in args:
                numbered = enumerate(value[:_MAX_PARTS])
                return tuple(self._convert(inner, args[0], f"{at}[{number}]", part) for number, inner in numbered)
            if isinstance(value, dict) and option is PromptMessage:
                hints = _hints(option)
                known = {name: inner for name, inner in value.items() if name in hints}
                return option(**{name: self._convert(known[name], hints[name], f"{at}.{name}", part) for name in known})
        return None

    def _unknown(self, raw: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> bool:
        """Report fields that are not known. Returns whether there are any."""
        unknown = [name for name in raw if name not in known]
        for name in unknown:
            self._add(f"{prefix}{name[:100]}", f"there is no such field.{nearest(name, known)}")
        return bool(unknown)

    def _add(self, place: str, message: str) -> None:
        self.mistakes.append(Mistake(place, message))


def _empty(hint: Any) -> Any:
    """A value of a type in place of one that could not be converted; None where a default does."""
    options = list(options_of(hint))
    for option in options:
        kind = get_origin(option) or option
        if kind in (tuple, dict, PromptMessage) or (kind is str and type(None) not in options):
            return kind()
    return _NO_BODY if Body in options else None


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
