"""Everything that can be refused before a graph runs: names, cycles, types, fields.

A graph from JSON and one from a flow go through the same checks; only the places of mistakes differ. All mistakes are
found in one pass, and each is reported once: what depends on a mistake has the type `UNREAD`, of which all is right.
Nodes of JSON with fields that could not be read are checked too, with these fields empty.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from weft.workflow.graph.digest import dependencies
from weft.workflow.graph.mistakes import MAX_LISTED, Mistake, bounded_hints, nearest
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.node_checks import own_mistakes
from weft.workflow.graph.node_types import of_node
from weft.workflow.graph.nodes import (
    MAX_NODES,
    AnyNode,
    Body,
    DataNode,
    Field,
    GraphNode,
    LoopNode,
    PickNode,
    SwitchNode,
    Use,
    WorkflowGraph,
    count_nodes,
    unread_names,
    uses,
)
from weft.workflow.graph.templates import Reference, is_name, parse_reference, parse_template
from weft.workflow.graph.value_types import ANY, UNREAD, ValueType, common, follow
from weft.workflow.graph.values import TOO_DEEP, is_too_deep

MAX_DEPTH = 8
"""Bodies within bodies."""
MAX_CHECKS = 100_000
"""Nodes, those of a loop's body counted twice, as they are checked."""
MAX_CYCLIC = 100
"""Nodes in cycles after which no further cycle is looked for: each search reads the whole graph."""
MAX_TEMPLATE_CHARS = 4 << 20
"""Of all templates of a node."""
MAX_TEMPLATE_VALUES = 100_000
"""Values in lists and objects of a node that may be templates; those of `data` are none."""
MAX_REFERENCES = 10_000
"""Of a node."""
Types = Mapping[str, ValueType]
Unread = Mapping[int | None, Collection[str]]
"""By `id()` of a node (None: the graph), the places in it that could not be read and are reported already."""
_ANY_NAME = ""
"""In the names of a scope: a name that could not be read. So every other name may be this one."""
_SETS_TYPE = frozenset(
    ("", "messages", "schema", "tools", "of", "name", "source", "value", "init", "body", "cases", "default")
).union(PickNode.ONE_OF)
"""Places of a node that its type depends on."""
_RELIES_ON: Mapping[str, Collection[str]] = {
    "": ("messages", "prompt", "name", "source", *PickNode.ONE_OF),
    "max_items": PickNode.ONE_OF,
}
"""Place of a mistake in a node -> the fields beside it that it follows from."""


class _Place(NamedTuple):
    """Where a graph or a body stands."""

    prefix: str
    lines: Mapping[str, str]
    """Id of a node -> file and line; of a graph that Python code made."""

    def of(self, node_id: str) -> str:
        line = self.lines.get(node_id)
        return f"{self.prefix}{node_id[:100]}" if line is None else f"{line}: {node_id}"

    def inside(self, place: str) -> _Place:
        return self._replace(prefix=f"{place}.")


def check(
    graph: WorkflowGraph,
    lines: Mapping[str, str] | None = None,
    unread: Unread | None = None,
    inputs: Types | None = None,
) -> list[Mistake]:
    """The mistakes of a graph, in the order of its nodes. `lines` says where in a source file nodes were written;
    `unread` what of the graph is empty because it could not be read; `inputs` has what is known of the types of inputs,
    from the rows."""
    return checked_types(graph, lines, unread, inputs)[0]


@bounded_hints()
def checked_types(
    graph: WorkflowGraph,
    lines: Mapping[str, str] | None = None,
    unread: Unread | None = None,
    inputs: Types | None = None,
) -> tuple[list[Mistake], Types]:
    """The mistakes of a graph (see `check`), and the types of all its names, as far as they are known."""
    place = _Place("", lines or {})
    mistakes = [Mistake("inputs", f"{name!r} is not a name") for name in graph.inputs if not is_name(name)]
    mistakes += _repeated("inputs", graph.inputs)
    count = count_nodes(graph.nodes)
    if count > MAX_NODES:
        what = f"there are {count:,} nodes, bodies included; the limit is {MAX_NODES:,}"
        return [*mistakes, Mistake("nodes", what)], {}
    num_checks = _count_checks(graph.nodes)
    if num_checks > MAX_CHECKS:
        what = f"there are {num_checks:,} nodes, counted twice for each loop around them; the limit is {MAX_CHECKS:,}"
        return [*mistakes, Mistake("nodes", what)], {}
    large = too_large(graph.nodes)
    if large:
        return [*mistakes, *large], {}
    checker = _Checker(mistakes, unread or {})
    of_graph = checker.unread(None)
    if not graph.outputs and not _touches("outputs", of_graph):
        mistakes.append(Mistake("outputs", "a workflow must have an output"))
    scope = {name: (inputs or {}).get(name, ANY) for name in graph.inputs}
    if _touches("inputs", of_graph):
        scope[_ANY_NAME] = UNREAD
    for name in graph.inputs:
        if any(node.id == name for node in graph.nodes):
            mistakes.append(Mistake("inputs", f"{name!r} is also the id of a node"))
    types = checker.body(Body(nodes=graph.nodes, outputs=graph.outputs), scope, place, 0)
    return checker.mistakes, types


def _count_checks(nodes: Iterable[AnyNode]) -> int:
    """How many checks of single nodes a graph takes: the body of a loop is checked twice."""
    return sum(
        1 + (2 if isinstance(node, LoopNode) else 1) * sum(_count_checks(body.nodes) for body in node.bodies.values())
        for node in nodes
    )


def too_large(nodes: tuple[AnyNode, ...]) -> list[Mistake]:
    """Nodes, those of bodies included, whose templates or values exceed a bound. Reads no template beyond it."""
    return [mistake for node in all_nodes(nodes) for mistake in _too_large(node)]


def _too_large(node: AnyNode) -> Iterator[Mistake]:
    """A mistake if the templates of a node would take long to evaluate: nothing bounds how often they are."""
    num_chars = num_values = num_references = 0

    def visit(place: str, field: Field, value: Any) -> Any:
        nonlocal num_chars, num_values, num_references
        pending = [value]
        while pending:
            each = pending.pop()
            num_values += 1
            if isinstance(each, str):
                num_chars += len(each)
                if num_chars <= MAX_TEMPLATE_CHARS and "{{" in each:
                    num_references += len(parse_template(each).references)
            elif isinstance(each, Mapping):
                pending += each.values()
            elif isinstance(each, (list, tuple)):
                pending += each
        return value

    if isinstance(node, DataNode) and is_too_deep(node.value):
        yield Mistake(node.id[:100], TOO_DEEP)
    node.visit(visit)
    counts = (
        (num_chars, MAX_TEMPLATE_CHARS, "characters of templates"),
        (num_values, MAX_TEMPLATE_VALUES, "values"),
        (num_references, MAX_REFERENCES, "references"),
    )
    for count, most, what in counts:
        if count > most:
            yield Mistake(node.id[:100], f"it has {count:,} {what}; at most {most:,} can be: refer to `data`")


class _Checker:
    """Walks graph and bodies, and collects mistakes."""

    def __init__(self, mistakes: list[Mistake], unread: Unread):
        self.mistakes = mistakes
        self._unread = unread

    def unread(self, node: GraphNode | None) -> Collection[str]:
        """The places of a node, or of the graph, that could not be read."""
        return self._unread.get(None if node is None else id(node), ())

    def body(self, body: Body, outer: Types, place: _Place, depth: int) -> dict[str, ValueType]:
        """Check a graph or a body. Returns the types of all names in it."""
        if depth > MAX_DEPTH:
            self.mistakes.append(Mistake(place.prefix.rstrip("."), f"bodies may be nested {MAX_DEPTH} deep"))
            return dict(outer)
        places = {node.id: place.of(node.id) for node in body.nodes}
        nameless = {node.id for node in body.nodes if "id" in self.unread(node)}
        for node_id, at in places.items():
            if not is_name(node_id) and node_id not in nameless:
                self.mistakes.append(
                    Mistake(at, "an id must be a letter or _, then letters, digits and _; 64 characters at most")
                )
        self.mistakes += _repeated(f"{place.prefix}nodes", [node.id for node in body.nodes])
        types: dict[str, ValueType] = {**outer, **{node.id: UNREAD for node in body.nodes}}
        if nameless:
            types[_ANY_NAME] = UNREAD
        by_id: dict[str, list[AnyNode]] = {node_id: [] for node_id in places}
        for node in body.nodes:
            by_id[node.id].append(node)
        found: dict[str, list[Mistake]] = {}
        for node_id in self._ordered(body.nodes, places):
            ours, self.mistakes = self.mistakes, []
            kinds = [self._node(node, types, places[node_id], place, depth) for node in by_id[node_id]]
            types[node_id] = kinds[0] if len(kinds) == 1 else UNREAD
            found[node_id], self.mistakes = self.mistakes, ours
        for node_id in places:
            self.mistakes += found[node_id]
        for name, text in body.outputs.items():
            at = f"{place.prefix}outputs.{name}"
            if not is_name(name):
                self.mistakes.append(Mistake(at, f"{name!r} is not a name"))
            self._type(text, types, at)
        return types

    def _node(self, node: AnyNode, types: Types, at: str, place: _Place, depth: int) -> ValueType:
        unread = self.unread(node)
        for use in uses(node):
            found = self._resolve(use.reference, types, f"{at}.{use.place}", in_text=use.field != "name")
            self._check_use(node, use, found, at)

        def type_of(reference: Reference) -> ValueType:
            found = _resolved(reference, types)
            return UNREAD if isinstance(found, str) else found

        own = [
            (where, what)
            for where, what in own_mistakes(node, type_of)
            if not _touches(where, unread) and not any(each in unread for each in _RELIES_ON.get(where, ()))
        ]
        self.mistakes += (Mistake(f"{at}.{where}" if where else at, what) for where, what in own)
        outputs = {}
        for where in node.bodies:
            if where not in unread:
                outputs[where] = self._inner(node, where, types, place.inside(f"{at}.{where}"), depth)
        names_unread = [(where, text) for where, text in unread_names(node) if not _touches(where, unread)]
        self.mistakes += (_no_reference(f"{at}.{where}", text) for where, text in names_unread)
        if any(where in _SETS_TYPE for where, _ in (*own, *names_unread)) or any(
            where in _SETS_TYPE or where.startswith(("body", "cases", "default")) for where in unread
        ):
            return UNREAD
        names = {where: sorted(body.outputs) for where, body in node.bodies.items()}
        if isinstance(node, LoopNode):
            names["init"] = sorted(node.init)
        if not all(names.values()):
            return UNREAD
        if len({tuple(each) for each in names.values()}) > 1:
            if isinstance(node, SwitchNode):
                given = "; ".join(f"{where}: {', '.join(each)}" for where, each in names.items())
                self.mistakes.append(Mistake(at, f"all cases must have the same outputs; they have {given}"))
            return UNREAD
        return of_node(node, type_of, outputs)

    def _inner(self, node: GraphNode, where: str, types: Types, place: _Place, depth: int) -> dict[str, ValueType]:
        """Check the body of a node at `where` in it. Returns the types of its outputs."""
        body, unread = node.bodies[where], self.unread(node)
        has_outputs = not _touches(f"{where}.outputs", unread)
        if has_outputs and not body.outputs and not isinstance(node, LoopNode):
            self.mistakes.append(Mistake(f"{place.prefix}outputs", "a body must have an output"))
        bound = self._bound(node, types)
        if isinstance(node, LoopNode):
            if has_outputs and node.init and set(body.outputs) != set(node.init):
                what = f"a loop's body must have the outputs that init has: {', '.join(node.init)}"
                self.mistakes.append(Mistake(f"{place.prefix}outputs", what))
            # Later rounds begin with what the body returns, so a name has the common type of both.
            ours, self.mistakes = self.mistakes, []
            first = self._outputs(body, self.body(body, {**types, **bound}, place, depth + 1))
            self.mistakes = ours
            bound = {name: common([kind, first.get(name, UNREAD)]) for name, kind in bound.items()}
        inside = self.body(body, {**types, **bound}, place, depth + 1)
        if isinstance(node, LoopNode) and node.until is not None:
            at = f"{place.prefix.removesuffix('body.')}until"
            kind = self._type(node.until, inside, at)
            if kind.kind not in ("boolean", "any"):
                self.mistakes.append(Mistake(at, f"must be true or false, not a {kind.kind}: use `matches`"))
        return self._outputs(body, inside)

    def _bound(self, node: GraphNode, types: Types) -> dict[str, ValueType]:
        if isinstance(node, LoopNode):
            known = {name: self._quiet(text, types) for name, text in node.init.items()}
            return known or {_ANY_NAME: UNREAD}
        over = self._quiet(getattr(node, "over", ""), types)
        item = over.items or (UNREAD if over == UNREAD or not over.is_list else ANY)
        return {name: item if name else UNREAD for name in node.bound}

    def _outputs(self, body: Body, types: Types) -> dict[str, ValueType]:
        return {name: self._quiet(text, types) for name, text in body.outputs.items()}

    def _quiet(self, text: str, types: Types) -> ValueType:
        reference = parse_reference(text)
        found = "" if reference is None else _resolved(reference, types)
        return UNREAD if isinstance(found, str) else found

    def _type(self, text: str, types: Types, at: str) -> ValueType:
        reference = parse_reference(text)
        if reference is None:
            self.mistakes.append(_no_reference(at, text))
            return UNREAD
        return self._resolve(reference, types, at)

    def _resolve(self, reference: Reference, types: Types, at: str, *, in_text: bool = False) -> ValueType:
        found = _resolved(reference, types)
        if isinstance(found, str):
            if in_text and reference.name not in types:
                found += f" Braces that are text are written \\{{{{{reference}}}}}, or with weft.workflow.escape(text)."
            self.mistakes.append(Mistake(at, found))
            return UNREAD
        return found

    def _check_use(self, node: GraphNode, use: Use, found: ValueType, at: str) -> None:
        if use.place.endswith(".chat") and not found.is_answer:
            what = f"{use.reference} is not the answer of a model, so there is no conversation to continue"
            self.mistakes.append(Mistake(f"{at}.{use.place}", what))
        elif found.kind == "list" and not use.is_alone:
            what = f"{use.reference} is a list and cannot be part of a text: join it with the function `join`"
            self.mistakes.append(Mistake(f"{at}.{use.place}", what))

    def _ordered(self, nodes: Iterable[AnyNode], places: Mapping[str, str]) -> Iterator[str]:
        """Ids of nodes after those of what they need. Reports cycles, as long as they have few nodes; their nodes come
        last."""
        needs = {name: set(each) for name, each in dependencies(nodes).items()}
        cyclic: list[str] = []
        while len(cyclic) < MAX_CYCLIC:
            try:
                order = list(graphlib.TopologicalSorter(needs).static_order())
                break
            except graphlib.CycleError as error:
                cycle = list(reversed(error.args[1]))
                first = min(cycle[:-1])
                turned = cycle[cycle.index(first) : -1] + cycle[: cycle.index(first)] + [first]
                shown = turned if len(turned) <= MAX_LISTED else [*turned[:MAX_LISTED], "…"]
                self.mistakes.append(Mistake(places[first], f"a cycle: {' needs '.join(shown)}"))
                cyclic += turned[:-1]
                for name in turned:
                    needs.pop(name, None)
                for each in needs.values():
                    each.difference_update(turned)
        else:
            order = list(needs)  # in any order: types of nodes that were not checked yet are not known
        yield from (*order, *cyclic)


def _resolved(reference: Reference, types: Types) -> ValueType | str:
    """The type of what a reference means, or what is wrong with it."""
    if reference.name not in types:
        if _ANY_NAME in types:
            return UNREAD
        return f"there is no value {reference.name!r}.{nearest(reference.name, types)}"
    found = follow(types[reference.name], reference.path)
    return f"{reference}: {found}" if isinstance(found, str) else found


def _touches(place: str, unread: Collection[str]) -> bool:
    """Whether a place of a node, a part of it, or what it is a part of, could not be read."""
    return bool(place) and any(
        place == each or place.startswith((f"{each}.", f"{each}[")) or each.startswith((f"{place}.", f"{place}["))
        for each in unread
    )


def _no_reference(at: str, text: str) -> Mistake:
    return Mistake(at, f"{text[:100]!r} is not the name of a value")


def _repeated(place: str, names: Iterable[str]) -> list[Mistake]:
    return [Mistake(place, f"{name!r} is given {count} times") for name, count in Counter(names).items() if count > 1]
