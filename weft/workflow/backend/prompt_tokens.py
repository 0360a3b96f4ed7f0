"""How plans render and count prompts: as the model does, or by estimate where its tokenizer is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.ids import unpack_tokens
from weft.endpoints.fields import request_from
from weft.endpoints.prompts import chat_prompt_of
from weft.endpoints.schemas.chat import ChatRequest
from weft.tokenizers.chats import render
from weft.tokenizers.tokenizer import Tokenizer

_ESTIMATED_BYTES = 4
"""Of a token of English text, in UTF-8."""


class TokenizerPrompts:
    """`PromptTokens` of a model whose tokenizer and chat template are here."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """As `PromptTokens.chat`, with what the server's chat endpoint gives the template."""
        asked = request_from(ChatRequest, {**request, "messages": list(messages)}, lambda name: {})
        return render(chat_prompt_of(asked), self._tokenizer)

    def encode(self, text: str) -> Sequence[int]:
        """As `PromptTokens.encode`."""
        return unpack_tokens(self._tokenizer.encode(text, add_special_tokens=False))


class EstimatedPrompts:
    """`PromptTokens` of a model of which only the name is known: a turn is its role and its text, a token four bytes.
    What two prompts have in common at their beginning, they have in common here too, up to three bytes."""

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """As `PromptTokens.chat`. What else the request gives a template stands before the messages."""
        given = "".join(f"{request[name]}\n" for name in ("tools", "documents") if request.get(name))
        said = "".join(f"<{message['role']}>\n{message.get('content') or ''}\n" for message in messages)
        return f"{given}{said}<assistant>\n"

    def encode(self, text: str) -> Sequence[int]:
        """As `PromptTokens.encode`: the bytes of a token are its number."""
        data = text.encode("utf-8", "surrogatepass")
        pieces = (data[at : at + _ESTIMATED_BYTES] for at in range(0, len(data), _ESTIMATED_BYTES))
        return [int.from_bytes(piece, "big") for piece in pieces]
