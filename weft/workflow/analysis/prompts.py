"""Prompts with values that are still to come.

A text stands for its values by **marks**: single characters that no text of a user has. A chat template renders them
like other text; what it rendered is then cut at them, and the static text between is tokenized. So roles, and all
that the template writes between messages, are part of the static text, and adjacent static text is one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

FIRST_MARK = 0x100000
MAX_MARKS = 0xFFFE
"""Characters of the second private-use plane."""
_MARKS = re.compile(f"([{chr(FIRST_MARK)}-{chr(FIRST_MARK + MAX_MARKS - 1)}])")

Template = tuple[int, ...]
"""A prompt: token ids, and for the value of mark k the number -1 - k."""


class PromptTokens(Protocol):
    """Renders and tokenizes prompts of one model. Calls with equal arguments return equal results."""

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        """The text that the model's chat template makes of messages with marks, ready for the answer. `request` has
        the other fields of the chat completion. Raises `WeftError` where the template refuses."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a piece of a prompt."""
        ...

    def count(self, text: str) -> int:
        """How many tokens a value of a row has, or about how many."""
        ...


TokensOf = Callable[[str], PromptTokens]
"""The name of a model -> its `PromptTokens`, the same object each time."""


def mark(number: int) -> str:
    """The character that stands for a value."""
    if number >= MAX_MARKS:
        raise ValueError(f"a workflow has at most {MAX_MARKS} values to come")
    return chr(FIRST_MARK + number)


def without_marks(text: str) -> str:
    """A user's text, in which no character can be taken for a mark."""
    return _MARKS.sub("\N{REPLACEMENT CHARACTER}", text)


def marks_of(text: str) -> tuple[int, ...]:
    """The numbers of the marks of a text, in order."""
    return tuple(ord(found) - FIRST_MARK for found in _MARKS.findall(text))


def template_of(text: str, tokens: PromptTokens) -> Template:
    """Cut a rendered prompt at its marks and tokenize what is between."""
    template: list[int] = []
    for piece in _MARKS.split(text):
        if _MARKS.fullmatch(piece):
            template.append(FIRST_MARK - ord(piece) - 1)
        elif piece:
            template.extend(tokens.encode(piece))
    return tuple(template)
