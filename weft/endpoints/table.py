"""The table of endpoints: path -> the request that an endpoint takes and the function that answers it.

HTTP routes and rows of a batch call the same functions. A caller decodes a JSON body with `Endpoint.decode`, creates a
`Record`, and awaits `Endpoint.create`; cancelling its task releases all pages. `weft.endpoints.errors.answer_of` gives
the response to any error raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from weft.endpoints import chat, completions, embeddings, tokens
from weft.endpoints.fields import request_from
from weft.endpoints.models import Models
from weft.endpoints.record import Record
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.endpoints.schemas.embedding import EmbeddingRequest
from weft.endpoints.schemas.tokens import DetokenizeRequest, TokenizeRequest
from weft.endpoints.writers import StreamEvents

Reply = msgspec.Struct | AsyncGenerator[StreamEvents, None]
"""A response, or the events of a stream if the request asks for one; the reader closes the stream."""


class Endpoint(NamedTuple):
    """The request that an endpoint takes and the function that answers it."""

    request: type[msgspec.Struct]
    create: Callable[[Any, Record, Models], Awaitable[Reply]]
    """Answers a decoded request. Raises `WeftError`."""

    def decode(self, body: Any, models: Models) -> msgspec.Struct:
        """Check a JSON value and convert it. Raises `InvalidRequest` or `Unsupported`, naming the field."""
        return request_from(self.request, body, models.sampling_defaults)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(ChatRequest, chat.create),
    "/v1/completions": Endpoint(CompletionRequest, completions.create),
    "/v1/embeddings": Endpoint(EmbeddingRequest, embeddings.create),
    "/tokenize": Endpoint(TokenizeRequest, tokens.tokenize),
    "/detokenize": Endpoint(DetokenizeRequest, tokens.detokenize),
}
"""Path -> endpoint. The method of all is POST."""
