"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import (
    AddGenerationPrompt,
    ChoiceDetails,
    ContinueFinalMessage,
    Documents,
    GenerationRequest,
    Json,
    PromptLogprobs,
    TemplateVariables,
    UsageInfo,
)
from weft.endpoints.schemas.nested import CHAT_SHAPES, TEXT_SHAPES, TOOL_CHOICE_SHAPE


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    """A conversation to continue with the assistant's next turn."""

    shapes: ClassVar[Mapping[str, Any]] = TEXT_SHAPES | CHAT_SHAPES | {"tool_choice": TOOL_CHOICE_SHAPE}

    messages: Annotated[list[Json], Meta(min_length=1, description="The conversation, oldest message first.")]
    max_tokens: (
        Annotated[
            int, Meta(ge=1, description="Maximum number of tokens per choice; absent: as many as the context leaves.")
        ]
        | None
    ) = None
    max_completion_tokens: (
        Annotated[int, Meta(ge=1, description="Newer name of `max_tokens`; takes precedence.")] | None
    ) = None
    logprobs: Annotated[bool, Meta(description="Return each token's log-probability.")] = False
    top_logprobs: (
        Annotated[int, Meta(description="With `logprobs`: also the k most probable tokens, up to 256.")] | None
    ) = None
    tools: Annotated[list[Json], Meta(description="Functions that the model may call.")] = msgspec.field(
        default_factory=list
    )
    documents: Documents = msgspec.field(default_factory=list)
    tool_choice: Annotated[Any, Meta(description='Which tools may or must be called; absent: "auto".')] = None
    parallel_tool_calls: Annotated[bool, Meta(description="Whether one answer may have several calls.")] = True
    add_generation_prompt: AddGenerationPrompt | None = None
    continue_final_message: ContinueFinalMessage = False
    add_special_tokens: Annotated[
        bool, Meta(description="Add the tokenizer's special tokens to those of the template.")
    ] = False
    reasoning_effort: (
        Annotated[str, Meta(description="Passed to the chat template; no effect if the template does not read it.")]
        | None
    ) = None
    verbosity: (
        Annotated[str, Meta(description="Passed to the chat template; no effect if the template does not read it.")]
        | None
    ) = None
    chat_template_kwargs: TemplateVariables = msgspec.field(default_factory=dict)


AnswerFinish = Literal["stop", "length", "tool_calls"]


class FunctionCall(msgspec.Struct, frozen=True):
    """A function and what it is called with."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message of a choice."""

    role: Literal["assistant"]
    content: str | None
    """Null where there are only calls, or only reasoning."""
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """What the model thought before it answered."""
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """A candidate token. `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the model itself, before temperature and penalties."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(ChoiceDetails, frozen=True, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: AnswerFinish
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a call: the name at once, then the arguments in pieces."""

    name: str | None = None
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to one of the calls; `id`, `type` and the name come with its first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to its choice's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ChoiceDetails, frozen=True, kw_only=True):
    """One choice's part of a stream event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: AnswerFinish | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
