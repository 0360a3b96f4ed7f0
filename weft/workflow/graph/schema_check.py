"""Whether a value follows a JSON schema, for values that come from outside and for answers of servers of other makes.

Answers of engines of Weft need no such check: a grammar writes them. Keywords that are not checked here are refused by
name before a value from outside is asked for; answers are not checked where a schema has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from weft.workflow.graph.regexes import RegexError, compile_regex

MAX_DEPTH = 64
"""Schemas within schemas, references followed."""
MAX_STEPS = 1_000_000
"""Schemas and constants that parts of a value are compared with: alternatives within alternatives would take any
time."""
_ANNOTATIONS = frozenset(
    [
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "format",
        "readOnly",
        "title",
        "writeOnly",
    ]
)


def is_number(value: Any) -> bool:
    """Whether a value is a number of JSON."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_multiple(value: float, step: float) -> bool:
    try:
        return math.isclose(value / step, round(value / step))
    except OverflowError:  # integers of any length are JSON
        return Fraction(value) % Fraction(str(step)) == 0


_TYPES: dict[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, (list, tuple)),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: is_number(value) and (isinstance(value, int) or value.is_integer()),
    "null": lambda value: value is None,
    "number": is_number,
    "object": lambda value: isinstance(value, Mapping),
    "string": lambda value: isinstance(value, str),
}
_LIMITS: dict[str, tuple[Callable[[Any], bool], Callable[[Any, Any], bool], str]] = {
    "minimum": (is_number, lambda value, least: value >= least, "is below {}"),
    "maximum": (is_number, lambda value, most: value <= most, "is above {}"),
    "exclusiveMinimum": (is_number, lambda value, least: value > least, "is not above {}"),
    "exclusiveMaximum": (is_number, lambda value, most: value < most, "is not below {}"),
    "multipleOf": (is_number, _is_multiple, "is not a multiple of {}"),
    "minLength": (_TYPES["string"], lambda value, least: len(value) >= least, "has fewer than {} characters"),
    "maxLength": (_TYPES["string"], lambda value, most: len(value) <= most, "has more than {} characters"),
    "minItems": (_TYPES["array"], lambda value, least: len(value) >= least, "has fewer than {} items"),
    "maxItems": (_TYPES["array"], lambda value, most: len(value) <= most, "has more than {} items"),
    "minProperties": (_TYPES["object"], lambda value, least: len(value) >= least, "has fewer than {} fields"),
    "maxProperties": (_TYPES["object"], lambda value, most: len(value) <= most, "has more than {} fields"),
}
"""Keyword -> (values that it is about, whether one follows it, what is wrong with one that does not)."""
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_LIMITS, is_number),
    "multipleOf": lambda step: is_number(step) and step > 0,
    **dict.fromkeys(("$defs", "definitions", "properties"), _TYPES["object"]),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum", "required"), _TYPES["array"]),
    "type": lambda kind: (
        isinstance(kind, str) or (isinstance(kind, list) and all(isinstance(name, str) for name in kind))
    ),
}
"""Keyword -> whether its value has the form that the check needs."""
_INNER = frozenset({"additionalProperties", "items", "not"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf"})
_KNOWN = frozenset({"$ref", "const", "enum", "pattern", "properties", "required", "type", *_LIMITS, *_INNER, *_LISTS})

CHECKED_KEYWORDS = _KNOWN | _ANNOTATIONS
"""Keywords that a schema may have for all of it to be checked."""


def unchecked_keywords(schema: Any) -> list[str]:
    """Keywords of a schema that `schema_mistake` cannot check, and what else it cannot read, sorted."""
    found: set[str] = set()
    _unchecked(schema, found, 0)
    return sorted(found)


def schema_mistake(schema: Any, value: Any) -> str | None:
    """The first way in which a value does not follow a schema, with its place; None where it does. May take seconds for
    a large value."""
    try:
        return next(_Comparison(schema).mistakes(schema, value, "", 0), None)
    except _TooManyStepsError:
        return f"the value needs more than {MAX_STEPS:,} comparisons with its schema"


def _unchecked(schema: Any, found: set[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        found.add(f"schemas {MAX_DEPTH} deep")
        return
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        found.add(f"{type(schema).__name__} instead of a schema")
        return
    found |= set(schema) - CHECKED_KEYWORDS
    malformed = {name for name, has_form in _FORMS.items() if name in schema and not has_form(schema[name])}
    found |= {f"{name} of an invalid form" for name in malformed}
    for name in ("$defs", "definitions", "properties"):
        inner = schema.get(name, {})
        for each in inner.values() if isinstance(inner, Mapping) else [inner]:
            _unchecked(each, found, depth + 1)
    for name in _INNER & set(schema):
        _unchecked(schema[name], found, depth + 1)
    for name in _LISTS & set(schema):
        for each in schema[name] if isinstance(schema[name], list) else [schema[name]]:
            _unchecked(each, found, depth + 1)
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or _resolved(reference, None) is not None:
        found.add("$ref to another document")
    if "pattern" in schema:
        try:
            compile_regex(schema["pattern"])
        except (RegexError, TypeError):
            found.add("pattern that is not RE2's")


class _TooManyStepsError(Exception):
    """The check was given up."""


class _Comparison:
    """One comparison of a value with a schema. Places are such as `items[3].name`, empty for the value itself."""

    def __init__(self, root: Any):
        self._root = root
        self._left = MAX_STEPS

    def mistakes(self, schema: Any, value: Any, place: str, depth: int) -> Iterator[str]:
        self._step(1)
        at = place or "the value"
        if depth > MAX_DEPTH:
            yield f"{at} is deeper than {MAX_DEPTH} schemas"
            return
        if isinstance(schema, bool):
            if not schema:
                yield f"{at} is not allowed"
            return
        if "$ref" in schema:
            target = _resolved(schema["$ref"], self._root)
            if target is None:
                yield f"{at}: the schema has no {schema['$ref']}"
            else:
                yield from self.mistakes(target, value, place, depth + 1)
        kinds = schema.get("type")
        if kinds is not None:
            names = [kinds] if isinstance(kinds, str) else kinds
            if not any(name in _TYPES and _TYPES[name](value) for name in names):
                yield f"{at} is not of type {' or '.join(map(str, names))}"
                return
        if "const" in schema and not _equal(value, schema["const"]):
            yield f"{at} is not {schema['const']!r:.100}"
        if "enum" in schema:
            self._step(len(schema["enum"]))
            if not any(_equal(value, each) for each in schema["enum"]):
                yield f"{at} is none of {', '.join(map(repr, schema['enum']))[:200]}"
        for name in _LIMITS.keys() & schema.keys():
            concerns, follows, message = _LIMITS[name]
            if concerns(value) and not follows(value, schema[name]):
                yield f"{at} {message.format(schema[name])}"
        if "pattern" in schema and isinstance(value, str) and compile_regex(schema["pattern"]).search(value) is None:
            yield f"{at} does not match {schema['pattern']!r:.100}"
        yield from self._combined(schema, value, place, depth)
        if isinstance(value, Mapping):
            yield from self._of_object(schema, value, place, depth)
        if isinstance(value, (list, tuple)) and "items" in schema:
            for number, item in enumerate(value):
                yield from self.mistakes(schema["items"], item, f"{place}[{number}]", depth + 1)

    def _of_object(self, schema: Mapping[str, Any], value: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{place or 'the value'} has no field {name!r}"
        for name, inner in value.items():
            wanted = properties.get(name, schema.get("additionalProperties", True))
            yield from self.mistakes(wanted, inner, f"{place}.{name}" if place else name, depth + 1)

    def _combined(self, schema: Mapping[str, Any], value: Any, place: str, depth: int) -> Iterator[str]:
        at = place or "the value"

        def follows(each: Any) -> bool:
            return next(self.mistakes(each, value, place, depth + 1), None) is None

        for each in schema.get("allOf", ()):
            yield from self.mistakes(each, value, place, depth + 1)
        if "anyOf" in schema and not any(map(follows, schema["anyOf"])):
            yield f"{at} matches no schema of anyOf"
        if "oneOf" in schema and sum(map(follows, schema["oneOf"])) != 1:
            yield f"{at} does not match exactly one schema of oneOf"
        if "not" in schema and follows(schema["not"]):
            yield f"{at} matches the schema of not"

    def _step(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _TooManyStepsError


def _resolved(reference: str, root: Any) -> Any:
    """What `#/a/b` means in a schema; None where there is nothing. Without a schema: None for one that may be there."""
    if reference != "#" and not reference.startswith("#/"):
        return reference if root is None else None
    found = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _equal(one: Any, other: Any) -> bool:
    """As JSON: true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other
