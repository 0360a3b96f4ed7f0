"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import PROMPT_SCHEMA, ChoiceDetails, GenerationRequest, PromptLogprobs, UsageInfo
from weft.endpoints.schemas.nested import TEXT_SHAPES

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """The body of a completion request."""

    shapes: ClassVar[Mapping[str, Any]] = TEXT_SHAPES

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(
            extra_json_schema=PROMPT_SCHEMA,
            description="A text, a list of texts, token ids, or a list of token id lists.",
        ),
    ]
    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum number of tokens per choice; 0 with `echo` or `prompt_logprobs`: only the prompt.",
        ),
    ] = DEFAULT_MAX_TOKENS
    logprobs: (
        Annotated[
            int,
            Meta(description="Return each token's log-probability and those of the k most probable tokens, up to 256."),
        ]
        | None
    ) = None
    echo: Annotated[bool, Meta(description="Return the prompt before the text.")] = False
    add_special_tokens: Annotated[
        bool, Meta(description="Add the tokenizer's special tokens to prompts given as text.")
    ] = True


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Per token, in parallel lists. Tokens that are no text of their own are written `bytes:\\xe2\\x82`."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    """Characters of the text before the token."""


class CompletionChoice(ChoiceDetails, frozen=True, kw_only=True):
    """One continuation; choice `p * n + i` is the i-th of prompt p."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion, or one event of a stream (without `usage` but for the last)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
