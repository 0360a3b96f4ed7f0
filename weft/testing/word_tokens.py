"""A stand-in for a model's tokenizer and chat template: a token is a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class WordTokens:
    """Implements `PromptTokens`. A role and the end of a message are a word each."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.encoded: list[str] = []
        """Everything that was tokenized, in order."""

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """`<role> content <end>` for each message, then `<assistant>`."""
        said = "".join(f"<{message['role']}> {message['content']} <end> " for message in messages)
        return f"{said}<assistant> "

    def encode(self, text: str) -> Sequence[int]:
        """A number per word, by first appearance."""
        self.encoded.append(text)
        return tuple(self._ids.setdefault(word, len(self._ids)) for word in text.split())

    def count(self, text: str) -> int:
        """How many words the text has."""
        return len(self.encode(text))
