"""What is known before any row is read: constants become part of texts, and what is made of constants alone a constant.

No function of the user's runs, and nothing is folded that fails: its rows have to. A map over a constant list stays a
map: statistics, errors and explanations name its nodes, and a planner sees the items as they are.
"""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from weft.workflow.graph import values
from weft.workflow.graph.builtin_functions import JOIN_SEPARATOR
from weft.workflow.graph.nodes import (
    AnyNode,
    Body,
    DataNode,
    Field,
    FunctionNode,
    ListNode,
    LoopNode,
    PickNode,
    SwitchNode,
    TextNode,
    WorkflowGraph,
    map_strings,
    reference_of,
)
from weft.workflow.graph.templates import Reference, Template, parse_template
from weft.workflow.graph.values import RowError
from weft.workflow.passes.base import Lookup, PassResult, UnknownValueError, body_of, nothing_cached, result

MAX_CONSTANT_CHARS = 16 << 20
"""Of all constants of a graph, as text; beyond it none is computed, and rows do that."""
MAX_TEXT_CHARS = 65_536
"""A longer text is not put into templates: each would have a copy."""


def fold_constants(graph: WorkflowGraph, lookup: Lookup = nothing_cached) -> PassResult:
    """Compute nodes whose inputs are constants, and put constants into templates."""
    return result(graph, _Folder().body(body_of(graph)))


class _Folder:
    """One walk over a graph, in order: what a node needs was folded before."""

    def __init__(self) -> None:
        self._constants: dict[str, Any] = {}
        self._num_chars = 0
        """Of the constants, as text."""
        self._taken: dict[str, Body] = {}
        """Switches by a constant -> the case that is taken."""

    def body(self, body: Body) -> Body:
        nodes = tuple(new for node in body.nodes for new in self._node(node))
        return Body(nodes=nodes, outputs={name: self._moved_text(text) for name, text in body.outputs.items()})

    def _node(self, node: AnyNode) -> tuple[AnyNode, ...]:
        """What stands for a node."""
        node = cast(AnyNode, node.visit(self._filled))
        try:
            return self._folded(node)
        except (UnknownValueError, RowError):
            pass
        node = cast(AnyNode, node.with_bodies({place: self.body(body) for place, body in node.bodies.items()}))
        if isinstance(node, LoopNode) and node.until is not None:
            node = replace(node, until=self._moved_text(node.until))
        return (node,)

    def _folded(self, node: AnyNode) -> tuple[AnyNode, ...]:
        """What a node is if it is constant. Raises `UnknownValueError`, and `RowError` for one that fails."""
        match node:
            case SwitchNode():
                place = values.case_of(node, self._value_of(reference_of(node.on)))
                self._taken[node.id] = taken = self.body(node.bodies[place])
                return taken.nodes
            case DataNode():
                value = node.value
            case TextNode():
                value = values.fill(node.template, self._value_of)
            case ListNode():
                value = values.list_of(node.of, self._value_of)
            case PickNode():
                value = values.pick(node, self._value_of(reference_of(node.of)))
            case FunctionNode() if node.name == "join":
                args = values.fill_values(node.args, self._value_of)
                value = values.join(args["of"], args.get("separator", JOIN_SEPARATOR), node)
            case _:
                raise UnknownValueError
        self._num_chars += len(values.text_of(value))
        if self._num_chars > MAX_CONSTANT_CHARS and not isinstance(node, DataNode):
            raise UnknownValueError
        self._constants[node.id] = value
        return (DataNode(id=node.id, value=value),)

    def _value_of(self, reference: Reference) -> Any:
        if reference.name not in self._constants:
            raise UnknownValueError
        return values.value_at(self._constants[reference.name], reference)

    def _moved(self, reference: Reference) -> Reference:
        """A reference to an output of a switch that is gone, as a reference to what the case returns."""
        taken = self._taken.get(reference.name)
        if taken is None:
            return reference
        found = reference_of(taken.outputs[reference.path[0]])
        return found._replace(path=(*found.path, *reference.path[1:]))

    def _moved_text(self, text: str) -> str:
        return str(self._moved(reference_of(text)))

    def _filled(self, place: str, field: Field, value: Any) -> Any:
        """A field of a node with constants in its templates."""
        if field == "name":
            return self._moved_text(value)
        return map_strings(value, self._filled_text if field == "text" else self._filled_value)

    def _filled_text(self, text: str) -> str:
        parts: list[str | Reference] = []
        for part in parse_template(text).parts:
            new = part if isinstance(part, str) else self._constant_text(self._moved(part))
            if isinstance(new, str) and parts and isinstance(parts[-1], str):
                parts[-1] += new  # braces of two texts can make a reference together
            elif new != "":
                parts.append(new)
        return str(Template(tuple(parts)))

    def _filled_value(self, text: str) -> str:
        """A string in JSON: one that is a single reference stands for the value as it is, so it stays one, and no other
        becomes one."""
        filled = self._filled_text(text)
        alone = parse_template(text).alone
        if alone is None:
            return filled if parse_template(filled).alone is None else self._moved_parts(text)
        return filled if isinstance(self._constants.get(alone.name), str) else self._moved_parts(text)

    def _moved_parts(self, text: str) -> str:
        parts = parse_template(text).parts
        return str(Template(tuple(part if isinstance(part, str) else self._moved(part) for part in parts)))

    def _constant_text(self, reference: Reference) -> str | Reference:
        """The text of a constant, or the reference itself."""
        try:
            text = values.text_of(self._value_of(reference))
        except (UnknownValueError, RowError):
            return reference
        return text if len(text) <= MAX_TEXT_CHARS else reference
