"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import PROMPT_SCHEMA, ModelName, Priority, SessionId

MAX_INPUTS = 2048


class EmbeddingRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Texts to turn into vectors."""

    model: ModelName | None = None
    input: Annotated[
        str | list[str | int | list[int]],
        Meta(
            extra_json_schema=PROMPT_SCHEMA,
            description=f"A text, up to {MAX_INPUTS} texts, token ids, or up to {MAX_INPUTS} token id lists.",
        ),
    ]
    encoding_format: Annotated[Literal["float", "base64"], Meta(description="base64: little-endian float32.")] = "float"
    dimensions: (
        Annotated[int, Meta(ge=1, description="Keep only the first k components, normalised to length 1.")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=-1,
                extra_json_schema={"not": {"const": 0}},
                description="Keep only the last k tokens; -1: as many as fit.",
            ),
        ]
        | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="Add the tokenizer's special tokens to texts.")] = True
    priority: Priority = 0
    session_id: SessionId = ""


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or base64 of their float32 bytes."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Number of prompt tokens, summed over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
