"""Converts chat messages of OpenAI's API to the form that chat templates expect.

Owns the validation of messages, with errors that name the place (`messages[3].content`). Knows no templates, and does
not change its input.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weft.abi.errors import InvalidRequest, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
}
SHORT_ID_LENGTH = 9
"""Letters and digits of the only ids of calls that the templates of Mistral accept."""
_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{SHORT_ID_LENGTH}}}")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def normalize(messages: Sequence[Mapping[str, Any]], *, keep_developer: bool = False) -> list[dict[str, Any]]:
    """Messages for a template: content as one string, tool calls with their arguments as mappings (as strings if they
    are no JSON object), without nulls.

    A `developer` message becomes a `system` message unless the template supports the role. Raises `InvalidRequest` and
    `Unsupported`, with `param` set to the place.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", "messages")
    names: dict[str, str] = {}
    """Function names by call id: templates expect a tool's result to name its function."""
    return [_message(message, f"messages[{i}]", names, keep_developer) for i, message in enumerate(messages)]


def with_mapped_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalized messages whose tool calls all have a mapping as arguments: text becomes `{"arguments": text}`. For
    templates that iterate over the arguments."""
    return [
        {**message, "tool_calls": [_with_mapping(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def with_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalized messages, of which those without text have an empty one: calls may stand alone, which not every
    template expects."""
    return [{**message, "content": message.get("content", "")} for message in messages]


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalized messages whose ids of calls all have `SHORT_ID_LENGTH` letters and digits: other ids, as of another
    server, become digests. A call and its result keep the same id."""
    short: list[dict[str, Any]] = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "id": _short_id(call["id"])} if "id" in call else call for call in message["tool_calls"]
            ]
        if "tool_call_id" in message:
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        short.append(changed)
    return short


def _short_id(id: str) -> str:
    if _SHORT_ID.fullmatch(id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID_LENGTH]


def _with_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def normalize_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools for a template, each `{"type": "function", "function": {"name": …}}`. Raises `InvalidRequest`."""
    for i, tool in enumerate(tools):
        function_of_tool(tool, f"tools[{i}]")
    return [{"type": "function", **tool} for tool in tools]


def function_of_tool(tool: object, path: str) -> Mapping[str, Any]:
    """The function of a tool, which has a name. Raises `InvalidRequest` and `Unsupported`, naming the place."""
    tool = _require_mapping(tool, path)
    if tool.get("type", "function") != "function":
        raise Unsupported(f"{path}.type is {_shown(tool['type'])}; only tools of type function are served", path)
    function = _require_mapping(tool.get("function"), f"{path}.function")
    _text(function, "name", f"{path}.function", required=True)
    return function


def num_characters(value: object) -> int:
    """Characters of all strings in a JSON value; decides whether it is processed on a thread."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, Iterable):
            stack.extend(item)
    return total


def _message(message: object, path: str, names: dict[str, str], keep_developer: bool) -> dict[str, Any]:
    message = _require_mapping(message, path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(ROLES)}, got {_shown(role)}", f"{path}.role")
    if role == "developer" and not keep_developer:
        role = "system"
    result: dict[str, Any] = {"role": "tool" if role == "function" else role}
    content = message.get("content")
    if content is not None:
        content = content_text(content, f"{path}.content")
    if role == "assistant":
        result |= _assistant(message, path, names)
        if content is None:
            content = _text(message, "refusal", path)
    elif content is None:
        raise InvalidRequest(f"{path}.content is missing; a {role} message needs text", f"{path}.content")
    if content is not None:
        result["content"] = content
    elif len(result) == 1:
        raise InvalidRequest(f"{path} has neither content nor tool_calls", f"{path}.content")
    name = _text(message, "name", path)
    if role == "tool":
        call = _text(message, "tool_call_id", path)
        if call is not None:
            result["tool_call_id"] = call
            name = name or names.get(call)
    if name is not None:
        result["name"] = name
    return result


def _assistant(message: Mapping[str, Any], path: str, names: dict[str, str]) -> dict[str, Any]:
    """Fields that only an assistant's message has."""
    result: dict[str, Any] = {}
    for field in _REASONING:
        text = _text(message, field, path)
        if text is not None:
            result[field] = text
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:
        # The older form, of one call.
        calls = [{"function": message["function_call"]}]
    if calls is None:
        return result
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{path}.tool_calls must be a list, got {_kind(calls)}", f"{path}.tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]", names) for i, call in enumerate(calls)]
    return result


def _tool_call(call: object, path: str, names: dict[str, str]) -> dict[str, Any]:
    call = _require_mapping(call, path)
    if call.get("type", "function") != "function":
        raise Unsupported(f"{path}.type is {_shown(call['type'])}; only calls of type function are served", path)
    function = _require_mapping(call.get("function"), f"{path}.function")
    name = _text(function, "name", f"{path}.function", required=True)
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"), f"{path}.function.arguments")},
    }
    call_id = _text(call, "id", path)
    if call_id is not None:
        result["id"] = call_id
        names[call_id] = name or ""
    return result


def _arguments(value: object, path: str) -> Any:
    """The arguments of a call as a mapping; templates render them in the model's format.

    Arguments that are no JSON object stay a string: models write such calls, and the conversation must go on.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string or an object, got {_kind(value)}", path)
    try:
        arguments = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    return arguments if isinstance(arguments, dict) else value


def content_text(content: object, path: str) -> str:
    """A message's text: parts are joined with a line break. Raises `InvalidRequest` and `Unsupported`, naming the
    place."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{path} must be a string or a list of parts, got {_kind(content)}", path)
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    part = _require_mapping(part, path)
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return _text(part, "text", path, required=True) or ""
    if kind == "refusal":
        return _text(part, "refusal", path, required=True) or ""
    if isinstance(kind, str) and kind in _MEDIA:
        raise Unsupported(f"{path} is {_MEDIA[kind]} input, which this model does not take; send text", path)
    raise InvalidRequest(f"{path}.type must be text, got {_shown(kind)}", f"{path}.type")


def _text(value: Mapping[str, Any], key: str, path: str, *, required: bool = False) -> str | None:
    text = value.get(key)
    if text is None and not required:
        return None
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{key} must be a string, got {_kind(text)}", f"{path}.{key}")
    return text


def _require_mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{path} must be an object, got {_kind(value)}", path)
    return value


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "a list"


def _shown(value: object) -> str:
    return repr(value[:64]) if isinstance(value, str) else _kind(value)
