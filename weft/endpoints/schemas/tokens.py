"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import (
    AddGenerationPrompt,
    ContinueFinalMessage,
    Documents,
    Json,
    ModelName,
    TemplateVariables,
)
from weft.endpoints.schemas.nested import CHAT_SHAPES


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A text, or a conversation, as the model would receive it. Exactly one of `prompt` and `messages`."""

    shapes: ClassVar[Mapping[str, Any]] = CHAT_SHAPES

    model: ModelName | None = None
    prompt: Annotated[str, Meta(description="A text.")] | None = None
    messages: Annotated[list[Json], Meta(min_length=1, description="A conversation.")] | None = None
    tools: Annotated[list[Json], Meta(description="Rendered by the chat template.")] = msgspec.field(
        default_factory=list
    )
    documents: Documents = msgspec.field(default_factory=list)
    add_special_tokens: (
        Annotated[
            bool, Meta(description="Add the tokenizer's special tokens; absent: true for a text, false for messages.")
        ]
        | None
    ) = None
    add_generation_prompt: AddGenerationPrompt | None = None
    continue_final_message: ContinueFinalMessage = False
    chat_template_kwargs: TemplateVariables = msgspec.field(default_factory=dict)
    return_token_strs: Annotated[bool, Meta(description="Adds `token_strs`, the tokens as strings.")] = False


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids and how many there are."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a detokenization request."""

    model: ModelName | None = None
    tokens: Annotated[list[int], Meta(description="Token ids.")]
    skip_special_tokens: Annotated[bool, Meta(description="Omit special tokens.")] = False


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the token ids."""

    prompt: str
