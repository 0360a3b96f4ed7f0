"""JSON schemas of Python types: what an answer must look like."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import isfunction
from typing import Any

import msgspec
from msgspec import inspect

from weft.workflow.frontend.trace import FlowError

_FORMATS: dict[type[inspect.Type], str] = {inspect.DateTimeType: "date-time", inspect.TimeType: "time"}
"""Types whose formats msgspec leaves out, because it also reads times without a zone."""


def schema_of(form: Any) -> dict[str, Any]:
    """The JSON schema of a dataclass, a pydantic model, or any type that msgspec or pydantic knows, without further
    keys; a schema as it is. References within it are resolved where they do not lead back to themselves, and titles are
    dropped. Raises `FlowError`."""
    if isinstance(form, Mapping):
        return dict(form)
    try:
        schema = _described(form)
    except (TypeError, ValueError, RuntimeError, NameError, AttributeError):  # most are pydantic's
        raise FlowError(
            f"{form!r:.100} has no JSON schema: give a JSON schema, a dataclass, a TypedDict, a type such as "
            "list[str], or a pydantic model, each as a class"
        ) from None
    defined = schema.pop("$defs", {})
    resolved = _resolve(schema, defined, ())
    assert isinstance(resolved, dict)
    if "#/$defs/" in str(resolved):
        resolved["$defs"] = {name: _resolve(inner, defined, (name,)) for name, inner in defined.items()}
    return resolved


def _described(form: Any) -> dict[str, Any]:
    """The schema as msgspec makes it, or pydantic where a type of its is in it: then the user has imported it."""
    pydantic: Any = sys.modules.get("pydantic")
    if hasattr(form, "model_json_schema"):
        model: dict[str, Any] = form.model_json_schema()
        return model
    if pydantic is not None and isinstance(form, pydantic.TypeAdapter):
        adapted: dict[str, Any] = form.json_schema()
        return adapted
    try:
        schema = msgspec.json.schema(form)
        _add_formats(schema, inspect.type_info(form), schema.get("$defs", {}), set())
    except TypeError:
        if pydantic is None or isfunction(form):  # of a function, pydantic describes the arguments
            raise
        schema = pydantic.TypeAdapter(form).json_schema()
    return schema


def _add_formats(schema: Any, of: inspect.Type, defined: Mapping[str, Any], done: set[int]) -> None:
    """Give the schemas of dates with times, and of times, their formats. Looks at what is alike in the schema and the
    type alone: of a union, each option is compared with each type. `done` has the ids of the schemas of classes."""
    schema = defined.get(str(schema.get("$ref")).removeprefix("#/$defs/"), schema)
    match of:
        case inspect.Metadata(type=inner):
            _add_formats(schema, inner, defined, done)
        case inspect.UnionType(types=kinds):
            for option in schema.get("anyOf", ()):
                for kind in kinds:
                    _add_formats(option, kind, defined, done)
        case inspect.DateTimeType() | inspect.TimeType() if schema.get("type") == "string":
            schema.setdefault("format", _FORMATS[type(of)])
        case inspect.CollectionType(item_type=item) if isinstance(schema.get("items"), dict):
            _add_formats(schema["items"], item, defined, done)
        case inspect.TupleType(item_types=items):
            for inside, item in zip(schema.get("prefixItems", ()), items, strict=False):
                _add_formats(inside, item, defined, done)
        case inspect.DictType(value_type=value) if isinstance(schema.get("additionalProperties"), dict):
            _add_formats(schema["additionalProperties"], value, defined, done)
        case _ if hasattr(of, "fields") and "properties" in schema and id(schema) not in done:
            done.add(id(schema))
            for field in of.fields:
                _add_formats(schema["properties"].get(field.encode_name, {}), field.type, defined, done)


def _resolve(schema: Any, defined: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_resolve(inner, defined, within) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in defined and name not in within:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolve({**defined[name], **rest}, defined, (*within, name))
    found = {
        key: (
            {field: _resolve(inner, defined, within) for field, inner in value.items()}
            if key == "properties"
            else _resolve(value, defined, within)
        )
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
    if isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)  # else an answer could not be given to the class
    return found
