"""JSON schemas of Python types: what an answer must look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weft.workflow.frontend.trace import FlowError


def schema_of(form: Any) -> dict[str, Any]:
    """The JSON schema of a dataclass, a pydantic model, or any type that msgspec knows; a schema as it is. References
    within it are resolved where they do not lead back to themselves, and titles are dropped. Raises `FlowError`."""
    if isinstance(form, Mapping):
        return dict(form)
    try:
        schema = form.model_json_schema() if hasattr(form, "model_json_schema") else msgspec.json.schema(form)
    except (TypeError, ValueError) as error:
        raise FlowError(f"{form!r} has no JSON schema: {error}") from None
    defined = schema.pop("$defs", {})
    resolved = _resolve(schema, defined, ())
    assert isinstance(resolved, dict)
    if "#/$defs/" in str(resolved):
        resolved["$defs"] = {name: _resolve(inner, defined, (name,)) for name, inner in defined.items()}
    return resolved


def _resolve(schema: Any, defined: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_resolve(inner, defined, within) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in defined and name not in within:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolve({**defined[name], **rest}, defined, (*within, name))
    return {
        key: (
            {field: _resolve(inner, defined, within) for field, inner in value.items()}
            if key == "properties"
            else _resolve(value, defined, within)
        )
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
