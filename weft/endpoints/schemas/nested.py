"""What the objects inside a request may have: messages, tools, formats.

Requests keep these objects as plain mappings, because chat templates read them; these structs list their fields, for
the check that refuses unknown ones and for the OpenAPI document. Values are checked where they are used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import Json, StreamOptions


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call in a message."""

    name: Annotated[str, Meta(description="As in `tools`.")]
    arguments: Annotated[
        str | Json | None, Meta(description="The arguments: a string, of JSON unless the model erred, or an object.")
    ] = None


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier."""

    id: Annotated[str | None, Meta(description="Id that the `tool` message refers to.")] = None
    type: Annotated[Literal["function"], Meta(description="The kind of tool.")] = "function"
    function: Annotated[CalledFunction, Meta(description="The function and its arguments.")]


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message's text."""

    type: Annotated[Literal["text", "input_text", "output_text", "refusal"], Meta(description="Kind of the part.")]
    text: Annotated[str | None, Meta(description="The text, unless `type` is `refusal`.")] = None
    refusal: Annotated[str | None, Meta(description="The text if `type` is `refusal`.")] = None


Content = str | list[str | ContentPart]
_CONTENT = "A string, or parts that are joined with line breaks."
_NAME = "Name of the speaker, for chat templates that use it."


class SpokenMessage(msgspec.Struct, kw_only=True):
    """A turn of the user, or an instruction."""

    role: Annotated[Literal["system", "developer", "user"], Meta(description="Role of the speaker.")]
    content: Annotated[Content, Meta(description=_CONTENT)]
    name: Annotated[str | None, Meta(description=_NAME)] = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """An earlier answer: its content or its calls."""

    role: Annotated[Literal["assistant"], Meta(description="Role of the speaker.")]
    content: Annotated[Content | None, Meta(description=_CONTENT)] = None
    name: Annotated[str | None, Meta(description=_NAME)] = None
    tool_calls: Annotated[list[MessageToolCall] | None, Meta(description="Tool calls in this message.")] = None
    function_call: Annotated[CalledFunction | None, Meta(description="Older form of `tool_calls`.")] = None
    refusal: Annotated[str | None, Meta(description="The refusal; used as text if `content` is null.")] = None
    reasoning_content: Annotated[str | None, Meta(description="Reasoning before the content.")] = None
    reasoning: Annotated[str | None, Meta(description="Another name of `reasoning_content`.")] = None
    thinking: Annotated[str | None, Meta(description="Another name of `reasoning_content`.")] = None


class ToolMessage(msgspec.Struct, kw_only=True):
    """What a call of a tool gave."""

    role: Annotated[Literal["tool", "function"], Meta(description="`function` is an older name of `tool`.")]
    content: Annotated[Content, Meta(description=_CONTENT)]
    tool_call_id: Annotated[str | None, Meta(description="Id of the call that this message answers.")] = None
    name: Annotated[str | None, Meta(description="Name of the function; absent: that of the call.")] = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(description="1 to 64 characters of `A-Z a-z 0-9 _ . -`.")]
    description: Annotated[str | None, Meta(description="Description for the model.")] = None
    parameters: Annotated[Json | None, Meta(description="JSON schema of the arguments, of type object.")] = None
    strict: Annotated[
        bool | None, Meta(description="true: arguments follow the schema with `tool_choice` `auto` too.")
    ] = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool of a chat."""

    type: Annotated[Literal["function"], Meta(description="The kind of tool.")] = "function"
    function: Annotated[FunctionDefinition, Meta(description="The function.")]


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: Annotated[str, Meta(description="As in `tools`.")]


class ToolReference(msgspec.Struct, kw_only=True):
    """One of the tools, by name."""

    type: Annotated[Literal["function"], Meta(description="The kind of tool.")]
    function: Annotated[FunctionName, Meta(description="The function.")]


class AllowedTools(msgspec.Struct, kw_only=True):
    """Restriction of a choice to some of the request's tools."""

    mode: Annotated[Literal["auto", "required"], Meta(description="Whether a call is optional or required.")]
    tools: Annotated[list[ToolReference], Meta(min_length=1, description="The tools that may be called.")]


class ToolChoice(msgspec.Struct, kw_only=True):
    """The object form of `tool_choice`."""

    type: Annotated[
        Literal["function", "allowed_tools"],
        Meta(description="Kind of the choice; the field of the same name is required."),
    ]
    function: Annotated[FunctionName | None, Meta(description="The function that must be called.")] = None
    allowed_tools: Annotated[AllowedTools | None, Meta(description="The functions that may be called.")] = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name."""

    name: Annotated[str, Meta(description="Required; no effect on the text.")]
    schema: Annotated[Json, Meta(description="The schema that the text follows.")]
    description: Annotated[str | None, Meta(description="No effect on the text.")] = None
    strict: Annotated[bool | None, Meta(description="No effect: the schema is always enforced.")] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of an answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Meta(description="Any text, a JSON object, or JSON that follows a schema."),
    ]
    json_schema: Annotated[JsonSchemaFormat | None, Meta(description="Required with type `json_schema`.")] = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """What a text must be: exactly one of these."""

    json: Annotated[Any, Meta(description="A JSON schema, as an object or a string.")] = None
    regex: Annotated[str | None, Meta(description="A regular expression that matches the whole text.")] = None
    choice: Annotated[list[str] | None, Meta(description="The strings that the text may be.")] = None
    grammar: Annotated[str | None, Meta(description="A grammar, in Lark or GBNF.")] = None
    json_object: Annotated[bool | None, Meta(description="true: any JSON object.")] = None
    whitespace_pattern: Annotated[str | None, Meta(description="Regular expression for white space in JSON.")] = None
    disable_any_whitespace: Annotated[bool | None, Meta(description="true: no white space in JSON.")] = None


TEXT_SHAPES: dict[str, Any] = {
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
    "stream_options": StreamOptions,
}
"""Of fields of every request that generates."""
CHAT_SHAPES: dict[str, Any] = {
    "messages": list[SpokenMessage | AssistantMessage | ToolMessage],
    "tools": list[ToolDefinition],
}
"""Of fields that a chat template reads."""
TOOL_CHOICE_SHAPE: Any = Literal["auto", "none", "required"] | ToolChoice | None

NESTED_SHAPES: tuple[type[msgspec.Struct], ...] = (
    SpokenMessage,
    AssistantMessage,
    ToolMessage,
    ContentPart,
    MessageToolCall,
    CalledFunction,
    ToolDefinition,
    FunctionDefinition,
    ToolChoice,
    FunctionName,
    AllowedTools,
    ToolReference,
    ResponseFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    StreamOptions,
)
"""All structs that shapes are made of."""

NESTED_ADVISORY: dict[type[msgspec.Struct], dict[str, str]] = {
    AssistantMessage: {"annotations": "not shown to the model"},
    ContentPart: {
        "annotations": "not shown to the model",
        "cache_control": "the prefix index matches tokens",
    },
    MessageToolCall: {"index": "calls keep their order"},
    ToolDefinition: {"cache_control": "the prefix index matches tokens"},
}
"""Accepted inside requests; nothing in the answer depends on them."""
