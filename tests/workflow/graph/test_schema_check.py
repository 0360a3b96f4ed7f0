"""Values from outside against JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest

from weft.workflow.graph.schema_check import MAX_DEPTH, schema_mistake, unchecked_keywords

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["a", "b", 1]}},
}


@pytest.mark.parametrize(
    ("schema", "value", "mistake"),
    [
        (PERSON, {"name": "x"}, None),
        (PERSON, {"name": "x", "tags": ["a", 1]}, None),
        (PERSON, {}, "the value has no field 'name'"),
        (PERSON, {"name": ""}, "name has fewer than 1 characters"),
        (PERSON, {"name": "x", "tags": ["a", True]}, "tags[1] is none of"),
        (PERSON, {"name": "x", "more": 1}, "more is not allowed"),
        (PERSON, [], "the value is not of type object"),
        ({"type": ["integer", "null"]}, None, None),
        ({"type": "integer"}, 2.0, None),
        ({"type": "integer"}, True, "not of type integer"),
        ({"type": "integer"}, 2.5, "not of type integer"),
        ({"const": 1}, True, "is not 1"),
        ({"minimum": 2, "maximum": 3}, 4, "is above 3"),
        ({"minimum": 2}, "text", None),
        ({"exclusiveMinimum": 2}, 2, "is not above 2"),
        ({"exclusiveMaximum": 2}, 2, "is not below 2"),
        ({"multipleOf": 0.1}, 0.3, None),
        ({"multipleOf": 2}, 3, "is not a multiple of 2"),
        ({"minItems": 1, "maxItems": 2}, [1, 2, 3], "has more than 2 items"),
        ({"maxProperties": 0}, {"a": 1}, "has more than 0 fields"),
        ({"pattern": "^a+$"}, "aab", "does not match"),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, 2, "matches no schema of anyOf"),
        ({"oneOf": [{"minimum": 1}, {"minimum": 3}]}, 4, "exactly one schema of oneOf"),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, 4, "is above 3"),
        ({"not": {"type": "null"}}, None, "matches the schema of not"),
        ({"$ref": "#/no"}, 1, "the schema has no #/no"),
        ({"$ref": "#"}, 1, f"deeper than {MAX_DEPTH} schemas"),
        (False, 1, "is not allowed"),
        ({}, {"any": ["thing"]}, None),
        ({"type": "integer", "multipleOf": 2}, 2 * 10**400, None),
        ({"multipleOf": 0.1}, 10**400, None),
        ({"multipleOf": 0.3}, 10**400, "is not a multiple of 0.3"),
        # Each alternative has two, 32 deep.
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, 1, "needs more than"),
        ({"items": {"enum": list(range(10_000))}}, [1] * 1000, "needs more than"),
    ],
)
def test_mistakes(schema: Any, value: Any, mistake: str | None) -> None:
    found = schema_mistake(schema, value)
    assert (found is None) == (mistake is None), found
    assert mistake is None or mistake in (found or "")


def test_keywords_that_are_not_checked_are_known() -> None:
    assert unchecked_keywords(PERSON) == []
    deep: Any = {}
    for _ in range(MAX_DEPTH + 2):
        deep = {"items": deep}
    for schema, found in (
        ({"properties": {"a": {"dependentRequired": {}, "title": "A"}}}, "dependentRequired"),
        ({"anyOf": [{"if": {}}]}, "if"),
        ({"$ref": "https://example.com/schema"}, "$ref to another document"),
        ({"pattern": "(?=x)"}, "pattern that is not RE2's"),
        ({"items": [1]}, "list instead of a schema"),
        ({"minimum": "1"}, "minimum of an invalid form"),
        ({"multipleOf": 0}, "multipleOf of an invalid form"),
        ({"not": {"enum": 5}}, "enum of an invalid form"),
        ({"type": ["string", 5]}, "type of an invalid form"),
        (deep, f"schemas {MAX_DEPTH} deep"),
    ):
        assert unchecked_keywords(schema) == [found]
