"""The tools of a chat request: their schemas, and whether the model may or must call them.

Owns `tools`, `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest` and `Unsupported`, naming the field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, Unsupported
from weft.endpoints.constraints import check_size
from weft.endpoints.dialect import Dialect
from weft.endpoints.grammars import CallableTool, Calls
from weft.endpoints.schemas.chat import ChatRequest
from weft.tokenizers.messages import function_of_tool

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = (
    'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": …}}, or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": …}}.'
)
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolPlan(NamedTuple):
    """The effect of a request's tools on its answer."""

    calls: Calls | None = None
    """The calls to parse in the answer; None: the whole answer is content."""
    choice: Literal["auto", "required"] = "auto"
    """`auto`: the model may also answer with content. `required`: the answer consists of calls only."""

    @property
    def ends_with_a_call(self) -> bool:
        """Whether the answer must end with its first call and no grammar of the whole answer ensures that."""
        return self.calls is not None and self.calls.only_one and self.choice == "auto"


def tool_plan(body: ChatRequest, dialect: Dialect) -> ToolPlan:
    """Check the tools of a request and decide how the model may call them."""
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools[: MAX_TOOLS + 1])]
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(body.tools)} entries, at most {MAX_TOOLS}.", "tools")
    names = [tool.name for tool in tools]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidRequest(f"tools has two functions named {twice[0]!r}; give each a name of its own.", "tools")
    choice = _choice(body.tool_choice, names)
    if choice == "none" or not tools:
        return ToolPlan()
    if dialect.tool_form is None:
        raise Unsupported(
            "tools: the format of this model's tool calls is not known from its chat template. Start the server "
            'with --tool-call-parser hermes, llama3_json or mistral, or send "tool_choice": "none".',
            "tools",
        )
    only_one = not body.parallel_tool_calls
    if isinstance(choice, _Named):
        wanted = frozenset(choice.functions)
        chosen = [tool for tool in tools if tool.name in wanted]
        return ToolPlan(_calls(chosen, only_one or choice.only_one), choice.mode)
    return ToolPlan(_calls(tools, only_one), choice)


class _Named(NamedTuple):
    """A choice of one or several functions by name."""

    functions: list[str]
    only_one: bool
    mode: Literal["auto", "required"] = "required"


def _choice(value: Any, names: list[str]) -> Literal["auto", "none", "required"] | _Named:
    if value is None or value == "auto":
        return "auto"
    if value == "none":
        return "none"
    kind = value.get("type") if isinstance(value, dict) else None
    if value != "required" and kind not in ("function", "allowed_tools"):
        raise InvalidRequest(_CHOICES, "tool_choice")
    if not names:
        raise InvalidRequest("tool_choice requires a call, and there are no tools.", "tool_choice")
    if value == "required":
        return "required"
    if kind == "function":
        return _Named([_named(value, names, "tool_choice")], only_one=True)
    allowed = value.get("allowed_tools")
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise InvalidRequest(f'{path} must be an object with a "mode" and a list of "tools".', path)
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f'{path}.mode must be "auto" or "required".', f"{path}.mode")
    if len(allowed["tools"]) > MAX_TOOLS:
        raise InvalidRequest(f"{path}.tools has {len(allowed['tools'])} entries, at most {MAX_TOOLS}.", f"{path}.tools")
    chosen = [_named(tool, names, f"{path}.tools[{number}]") for number, tool in enumerate(allowed["tools"])]
    return _Named(chosen, only_one=False, mode=mode)


def _named(value: Any, names: list[str], path: str) -> str:
    """The function that a choice names, which must be one of the tools."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(_CHOICES if path == "tool_choice" else f"{path} must name a function.", path)
    if name not in names:
        raise InvalidRequest(
            f"{path} names {name!r:.80}, which is not among the tools: {', '.join(names)[:500]}.",
            f"{path}.function.name",
        )
    return name


def _calls(tools: list[CallableTool], only_one: bool) -> Calls:
    check_size(sum(len(msgspec.json.encode(tool.parameters)) for tool in tools), "tools")
    return Calls(tools, only_one)


def _tool(tool: Mapping[str, Any], path: str) -> CallableTool:
    function = function_of_tool(tool, path)
    path += ".function"
    name = function["name"]
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{path}.name must be 1 to 64 of A-Z a-z 0-9 _ . -", f"{path}.name")
    parameters = function.get("parameters")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{path}.strict must be true or false.", f"{path}.strict")
    if parameters is None:
        return CallableTool(name, _NO_PARAMETERS, bool(strict))
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{path}.parameters must be the JSON schema of an object.", f"{path}.parameters")
    return CallableTool(name, {"type": "object", **parameters}, bool(strict), f"{path}.parameters")
