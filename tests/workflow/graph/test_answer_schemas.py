"""Schemas that no answer can be held to are found before a run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.workflow.shapes import body, graph, llm, mapped
from weft.workflow.graph import InvalidGraph, graph_from_dict
from weft.workflow.graph.answer_schemas import MAX_CHECKED_LEVELS, answer_schema_mistake


@pytest.mark.parametrize(
    ("schema", "mistake"),
    [
        ({}, None),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "title": "x"}, None),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, None),
        ({"type": "strin"}, "type: 'strin' is not a type; the types are array, boolean"),
        ({"name": "string"}, "there is no keyword of JSON schemas in it, but name: fields stand under properties"),
        (
            {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}},
            'properties.tags: "uniqueItems" is not supported',
        ),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "properties.a: "),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no JSON value can satisfy it"),
        ({"type": "string", "x-guidance": {"max_string_chars": None}}, '"x-guidance" cannot be set in a JSON schema'),
        ({"const": object()}, "it is not JSON"),
        ({"$ref": "#/$defs/no"}, "$ref names #/$defs/no, which does not exist"),
    ],
)
def test_what_no_engine_can_follow_has_its_place(schema: dict[str, Any], mistake: str | None) -> None:
    found = answer_schema_mistake(schema)
    assert (found is None) == (mistake is None), found
    assert mistake is None or mistake in (found or "")
    raw = graph(mapped("m", "q", body(llm("a", "{{i}}", schema=schema), value="a")))
    if mistake is not None:
        with pytest.raises(InvalidGraph) as caught:
            graph_from_dict(raw)
        assert str(caught.value.mistakes[0]).startswith("m.body.a.schema: ")


def test_a_chain_of_references_ends_no_process() -> None:
    chain = {f"a{at}": {"items": {"$ref": f"#/$defs/a{at + 1}"}} for at in range(20_000)}
    assert answer_schema_mistake({"$ref": "#/$defs/a0", "$defs": chain}) is None
    deep: dict[str, Any] = {}
    for _ in range(MAX_CHECKED_LEVELS + 1):
        deep = {"items": deep}
    assert answer_schema_mistake(deep) is None


def test_checking_a_schema_imports_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys, weft; from weft import ops; "
        "assert weft.flow(lambda q: ops.llm(q, schema={'type': 'string'})).digest; "
        "print([name for name in ('torch', 'numpy', 'starlette', 'httpx', 'sqlalchemy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
