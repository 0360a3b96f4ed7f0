"""Tools: typed Python functions as JSON schemas for a model, and the calls that a model writes.

@tool
async def weather(city: str, days: int = 1) -> str:
    \"\"\"The weather of a city.

    city: its name in English
    days: how many days ahead
    \"\"\"
    ...

ctx = Context(tools=[weather])
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, Union

from weft.abi.errors import InvalidRequest, WeftError
from weft.sdk.main import encode

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    dict: {"type": "object"},
    list: {"type": "array"},
    Any: {},
    object: {},
}


class Tool:
    """A function that a model may call."""

    def __init__(self, function: Callable[..., Any], name: str, schema: dict[str, Any]):
        self.function = function
        self.name = name
        self.schema = schema
        """`{"type": "function", "function": {"name", "description", "parameters"}}`"""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as if it were not decorated."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model. Its arguments are also attributes: `call.city`."""

    id: str
    name: str
    text: str
    """The JSON text of the arguments, exactly as the model wrote it."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The decoded arguments. Raises `InvalidRequest` unless they are a JSON object; the message may be passed to
        the model."""
        try:
            values = json.loads(self.text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise InvalidRequest(f"the arguments of the call of {self.name} are not a JSON object: {self.text}")
        return values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(f"the call of {self.name} has no argument {name}") from None

    def to_json(self) -> dict[str, Any]:
        """The call as JSON values, in the form of chat messages."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


def tool(function: Callable[..., Any]) -> Tool:
    """Turn a function with type hints into a tool.

    The first paragraph of its docstring describes it; a line `name: text` in the rest describes a parameter. Raises
    `InvalidRequest` for a parameter whose type has no JSON form.
    """
    if isinstance(function, Tool):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    text, notes = _described(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidRequest(f"the tool {name} takes {parameter}; only parameters with names can be filled", name)
        schema = dict(_schema(hints.get(parameter.name, Any), f"{name}({parameter.name})"))
        if parameter.name in notes:
            schema["description"] = notes[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": name, "description": text, "parameters": parameters}
    return Tool(function, name, {"type": "function", "function": about})


def schemas(tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Tool]]:
    """JSON schemas for the chat template, and the tools among them that can be run. A mapping is a schema itself."""
    plain: list[dict[str, Any]] = []
    runnable: list[Tool] = []
    for item in tools:
        if isinstance(item, Mapping):
            plain.append(dict(item) if "function" in item else {"type": "function", "function": dict(item)})
            continue
        known = item if isinstance(item, Tool) else tool(item)
        runnable.append(known)
        plain.append(known.schema)
    return plain, runnable


async def execute(call: ToolCall, tools: Iterable[Tool]) -> str:
    """Run the tool that a call names and return its result as text for the model.

    An error of the tool becomes text too, so that the model can try again. `LimitExceeded`, `EngineDead` and
    `OutOfPages` propagate.
    """
    found = next((known for known in tools if known.name == call.name), None)
    if found is None:
        return f"Error: there is no tool {call.name}"
    try:
        value = found.function(**call.arguments)
        if inspect.isawaitable(value):
            value = await value
    except WeftError as error:
        if error.kind in ("limit_exceeded", "engine_dead", "out_of_pages"):
            raise
        return f"Error: {error}"
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"
    return result_text(value)


def result_text(value: object) -> str:
    """The text of a tool's result: strings and HTTP responses as text, other values as JSON."""
    if isinstance(value, str):
        return value
    body = getattr(value, "text", None)
    if isinstance(body, str):
        return body
    return encode(value, "the result of the tool").decode()


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and the notes on single parameters."""
    head, _, rest = doc.partition("\n\n")
    notes = {}
    for line in rest.splitlines():
        name, colon, text = line.strip().partition(":")
        if colon and name.isidentifier() and text.strip():
            notes[name] = text.strip()
    return " ".join(head.split()), notes


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is typing.Annotated:
        schema = dict(_schema(args[0], where))
        notes = [note for note in args[1:] if isinstance(note, str)]
        return {**schema, "description": notes[0]} if notes else schema
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg, where) for arg in args]}
    if origin in (list, set, tuple, frozenset) or (origin is not None and _is_iterable(origin)):
        inner = [arg for arg in args if arg is not ...]
        return {"type": "array", "items": _schema(inner[0], where)} if inner else {"type": "array"}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], where)}
    if isinstance(hint, type) and (is_dataclass(hint) or typing.is_typeddict(hint)):
        hints = typing.get_type_hints(hint, include_extras=True)
        properties = {name: _schema(inner, f"{where}.{name}") for name, inner in hints.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    raise InvalidRequest(f"{where} has the type {hint!r}, which has no JSON form", where)


def _is_iterable(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping)
