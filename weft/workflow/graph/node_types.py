"""The type of each node's value, from the types of what it refers to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS
from weft.workflow.graph.nodes import (
    DataNode,
    ExternalNode,
    FunctionNode,
    GraphNode,
    ListNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    SwitchNode,
    TextNode,
    reference_of,
)
from weft.workflow.graph.templates import Reference, parse_template
from weft.workflow.graph.value_types import (
    ANY,
    BOOLEAN,
    TEXT,
    UNREAD,
    ValueType,
    common,
    follow,
    of_schema,
    of_value,
    outputs_of,
)


def of_node(
    node: GraphNode, type_of: Callable[[Reference], ValueType], bodies: Mapping[str, Mapping[str, ValueType]]
) -> ValueType:
    """The type of a node's value. `type_of` gives the types of what it refers to, and `bodies` those of the outputs of
    its bodies, by their places."""
    match node:
        case LlmNode():
            return _of_answer(node)
        case TextNode():
            return TEXT
        case DataNode():
            return of_value(node.value)
        case ListNode():
            items = [alone_type(item, type_of) for item in node.of]
            return ValueType("list", items=common(items) if items else None)
        case FunctionNode():
            builtin = BUILTIN_FUNCTIONS.get(node.name or "")
            return ANY if builtin is None else builtin.returns
        case ExternalNode():
            return of_schema(node.schema)
        case PickNode():
            return _of_pick(node, type_of(reference_of(node.of)))
        case MapNode():
            return outputs_of({name: ValueType("list", items=kind) for name, kind in bodies["body"].items()})
        case LoopNode():
            return outputs_of(bodies["body"])
        case SwitchNode():
            every = list(bodies.values())
            names = [name for name in every[0] if all(name in outputs for outputs in every)] if every else []
            return outputs_of({name: common(outputs[name] for outputs in every) for name in names})
    return ANY


def alone_type(value: Any, type_of: Callable[[Reference], ValueType]) -> ValueType:
    """The type of a value whose strings are templates."""
    if isinstance(value, str):
        alone = parse_template(value).alone
        return TEXT if alone is None else type_of(alone)
    return of_value(value) if isinstance(value, (int, float)) else ANY


def _of_answer(node: LlmNode) -> ValueType:
    is_answer = node.messages is not None  # after a prompt there is no conversation
    kind = TEXT if node.schema is None else of_schema(node.schema)
    kind = kind._replace(is_answer=is_answer)
    if not node.request.get("tools"):
        return kind
    return kind._replace(fields={**(kind.fields or {}), "tool_calls": ValueType("list")})


def _of_pick(node: PickNode, of: ValueType) -> ValueType:
    match node.way:
        case "field" | "slice" if of == UNREAD:
            return UNREAD
        case "field" if of.kind == "list":
            return of.items or ANY
        case "field":
            found = follow(of, (node.field or "",)) if of.kind == "object" else ANY
            return ANY if isinstance(found, str) else found
        case "split":
            return ValueType("list", items=TEXT)
        case "matches":
            return BOOLEAN
        case "slice":
            return of._replace(is_answer=False)
        case "regex" | "strip":
            return TEXT
    return ANY
