"""Whether answers can be held to a JSON schema: what no engine can follow is refused before a run, not once per row."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from weft.abi.errors import InvalidRequest
from weft.workflow.graph.schema_check import CHECKED_KEYWORDS

MAX_CHECKED_CHARS = 64 << 10
"""Of a schema as JSON. Servers refuse longer ones."""
MAX_CHECKED_LEVELS = 400
"""Lists and objects within others, along a chain of references: half of what a thread's stack has room for. Deeper
schemas are left to the engine, which compiles on a stack of its own."""
_OTHER_KEYWORDS = frozenset(
    [
        "$anchor",
        "additionalItems",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "patternProperties",
        "prefixItems",
        "propertyNames",
        "then",
        "unevaluatedProperties",
        "uniqueItems",
        "x-guidance",
    ]
)


def answer_schema_mistake(schema: Mapping[str, Any]) -> str | None:
    """Why no answer can be held to a schema, with the place in it; None where one can."""
    if schema and not set(schema) & (CHECKED_KEYWORDS | _OTHER_KEYWORDS):
        names = ", ".join(sorted(map(str, schema)))
        return (
            f"there is no keyword of JSON schemas in it, but {names:.100}: fields stand under properties, as in "
            '{"type": "object", "properties": {"name": {"type": "string"}}}'
        )
    try:
        text = msgspec.json.encode(schema).decode()
        depth = max((level for level, _ in _within(schema, 1)), default=1)
        targets = {each["$ref"] for _, each in _within(schema, 1) if isinstance(each.get("$ref"), str)}
    except RecursionError:
        return None
    except TypeError as error:
        return f"it is not JSON: {error}"
    if len(text) > MAX_CHECKED_CHARS or depth * (1 + len(targets)) > MAX_CHECKED_LEVELS:
        return None
    return _mistake(text)


@functools.lru_cache(256)
def _mistake(text: str) -> str | None:
    # Imported where there is a schema: the library of grammars takes longer to import than a flow to trace.
    from weft.core.grammar import Grammar
    from weft.engine.grammar_text import check_grammar

    try:
        check_grammar(Grammar("json_schema", text))
    except InvalidRequest as error:
        return error.message
    return None


def _within(value: Any, level: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a schema, with how deep they are nested."""
    if isinstance(value, Mapping):
        yield level, value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _within(each, level + 1)
