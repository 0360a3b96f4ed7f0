"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import Json
from weft.endpoints.schemas.nested import CHAT_SHAPES


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A text, or a conversation, as the model would receive it. Exactly one of `prompt` and `messages`."""

    shapes: ClassVar[Mapping[str, Any]] = CHAT_SHAPES

    model: Annotated[str, Meta(description="A served name; may be left out when only one model is served.")] | None = (
        None
    )
    prompt: Annotated[str, Meta(description="A text.")] | None = None
    messages: Annotated[list[Json], Meta(min_length=1, description="A conversation.")] | None = None
    tools: Annotated[list[Json], Meta(description="Rendered by the chat template.")] = msgspec.field(
        default_factory=list
    )
    documents: Annotated[list[Json], Meta(description="Documents, for chat templates that use them.")] = msgspec.field(
        default_factory=list
    )
    add_special_tokens: (
        Annotated[
            bool, Meta(description="Add the tokenizer's special tokens; absent: true for a text, false for messages.")
        ]
        | None
    ) = None
    add_generation_prompt: (
        Annotated[
            bool,
            Meta(description="Open the assistant's turn at the end; absent: unless `continue_final_message`."),
        ]
        | None
    ) = None
    continue_final_message: Annotated[bool, Meta(description="Leave the last message open for continuation.")] = False
    chat_template_kwargs: Annotated[Json, Meta(description="Additional variables for the chat template.")] = (
        msgspec.field(default_factory=dict)
    )
    return_token_strs: Annotated[bool, Meta(description="Adds `token_strs`, the tokens as strings.")] = False


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids and how many there are."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a detokenization request."""

    model: Annotated[str, Meta(description="A served name; may be left out when only one model is served.")] | None = (
        None
    )
    tokens: Annotated[list[int], Meta(description="Token ids.")]
    skip_special_tokens: Annotated[bool, Meta(description="Omit special tokens.")] = False


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the token ids."""

    prompt: str
