"""What is known of a value before anything runs: enough to refuse what can never work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from weft.workflow.graph.mistakes import listed, nearest

Kind = Literal["text", "number", "boolean", "list", "object", "any"]


class ValueType(NamedTuple):
    """The type of a value."""

    kind: Kind
    """`any`: not known before the value is there."""
    fields: Mapping[str, ValueType] | None = None
    """Of an object whose fields are known, of a node its outputs, of an answer with tools `tool_calls`."""
    items: ValueType | None = None
    """Of a list, where that is known."""
    is_answer: bool = False
    """Whether it is the answer of a model, whose conversation another call can go on with."""
    is_outputs: bool = False
    """Whether it is no value but the outputs of a node: a reference names one of them, unless there is only one."""

    @property
    def is_list(self) -> bool:
        """Whether it can be a list."""
        return self.kind in ("list", "any")


ANY = ValueType("any")
UNREAD = ValueType("any", is_answer=True, is_outputs=True)
"""Of what depends on a mistake, which is reported by itself: it may be anything, the answer of a model too."""
TEXT = ValueType("text")
NUMBER = ValueType("number")
BOOLEAN = ValueType("boolean")
_KINDS: dict[str, ValueType] = {"string": TEXT, "number": NUMBER, "integer": NUMBER, "boolean": BOOLEAN}


def of_schema(schema: Any) -> ValueType:
    """The type of what follows a JSON schema; `any` where the schema does not say it plainly."""
    if not isinstance(schema, Mapping) or "$ref" in schema:
        return ANY
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return ValueType("object")
        return ValueType("object", fields={str(name): of_schema(inner) for name, inner in properties.items()})
    if kind == "array":
        return ValueType("list", items=of_schema(schema.get("items")))
    return _KINDS.get(kind, ANY) if isinstance(kind, str) else ANY


def of_value(value: Any) -> ValueType:
    """The type of a JSON value."""
    if isinstance(value, str):
        return TEXT
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, (int, float)):
        return NUMBER
    if isinstance(value, Mapping):
        return ValueType("object", fields={str(name): of_value(inner) for name, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return ValueType("list", items=common(of_value(inner) for inner in value) if value else None)
    return ANY


def common(types: Iterable[ValueType]) -> ValueType:
    """The type of a value that has one of these."""
    first, *others = types
    if first == UNREAD or UNREAD in others:
        return UNREAD
    if all(other == first for other in others):
        return first
    kinds = {first.kind, *(other.kind for other in others)}
    is_answer = first.is_answer and all(other.is_answer for other in others)
    return ValueType(kinds.pop() if len(kinds) == 1 else "any", is_answer=is_answer)


def outputs_of(outputs: Mapping[str, ValueType]) -> ValueType:
    """The type of a node with outputs."""
    return ValueType("object", fields=outputs, is_outputs=True)


def follow(of: ValueType, path: Iterable[str]) -> ValueType | str:
    """The type at the end of a path, or what is wrong with the path."""
    for name in path:
        if of.kind == "any":
            return UNREAD if of == UNREAD else ANY
        what = "output" if of.is_outputs else "field"
        if of.kind != "object" and of.fields is None:
            return f"a {of.kind} has no {what} {name!r}"
        if of.fields is None:
            return ANY
        if name not in of.fields:
            known = listed(tuple(of.fields)) or "none"
            return f"there is no {what} {name!r}; there are {known}.{nearest(name, of.fields)}"
        of = of.fields[name]
    if of.is_outputs and of != UNREAD:
        assert of.fields is not None
        if len(of.fields) == 1:
            return next(iter(of.fields.values()))
        return f"name one of the outputs: {listed(tuple(of.fields))}"
    return of
