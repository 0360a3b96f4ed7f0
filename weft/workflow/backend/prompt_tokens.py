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

    def __init__(self, tokenizer: Tokenizer, max_counted_chars: int | None = None):
        """Of a value with more than `max_counted_chars` characters the beginning is counted, and the rest is taken to
        be alike; None: all are counted as they are."""
        self._tokenizer = tokenizer
        self._max_counted_chars = max_counted_chars

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """The prompt that the chat endpoint would render, with its defaults for the template. Raises `WeftError` where
        the template refuses."""
        asked = request_from(ChatRequest, {**request, "messages": list(messages)}, lambda name: {})
        return render(chat_prompt_of(asked), self._tokenizer)

    def encode(self, text: str) -> Sequence[int]:
        """Token ids by the model's tokenizer, without special tokens around."""
        return unpack_tokens(self._tokenizer.encode(text, add_special_tokens=False))

    def count(self, text: str) -> int:
        """Tokens of a value; of a long one only the beginning is tokenized, and the rest counted in proportion."""
        most = self._max_counted_chars
        if most is None or len(text) <= most:
            return len(self.encode(text))
        return round(len(self.encode(text[:most])) * len(text) / most)


class EstimatedPrompts:
    """`PromptTokens` of a model of which only the name is known: a turn is its role and its text, a token four bytes.
    What two prompts have in common at their beginning, they have in common here too, up to three bytes."""

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """Tools and documents of the request, then each message as its role and its text."""
        given = "".join(f"{request[name]}\n" for name in ("tools", "documents") if request.get(name))
        said = "".join(f"<{message['role']}>\n{message.get('content') or ''}\n" for message in messages)
        return f"{given}{said}<assistant>\n"

    def encode(self, text: str) -> Sequence[int]:
        """The bytes of the text in groups, each as a number that stands for a token."""
        data = text.encode("utf-8", "surrogatepass")
        pieces = (data[at : at + _ESTIMATED_BYTES] for at in range(0, len(data), _ESTIMATED_BYTES))
        return [int.from_bytes(piece, "big") for piece in pieces]

    def count(self, text: str) -> int:
        """The bytes of the text by the assumed bytes of a token, rounded up."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // _ESTIMATED_BYTES)
