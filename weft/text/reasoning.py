"""Incremental parser of reasoning between `<think>` and `</think>`.

White space around the tags belongs neither to reasoning nor to content. Text that does not begin with the tag is
content, unchanged.
"""

from __future__ import annotations

from weft.text.deltas import Content, Delta, Reasoning
from weft.text.markers import num_held

OPEN, CLOSE = "<think>", "</think>"


def is_open(prompt: str) -> bool:
    """Whether a prompt ends inside the model's reasoning."""
    return prompt.rstrip().endswith(OPEN)


def is_unfinished(message: str) -> bool:
    """Whether a message that the model is to continue ends inside its reasoning, at its beginning or further on."""
    return message.rfind(OPEN) > message.rfind(CLOSE)


class ReasoningParser:
    """Splits one answer into reasoning and content. `opened`: the prompt already has the opening tag; `begun`: and a
    part of the reasoning, so the answer's first white space is part of it, too."""

    def __init__(self, *, opened: bool = False, begun: bool = False):
        self._state = "reasoning" if opened else "start"
        self._text = ""
        """Text that was not returned yet."""
        self._trim = opened and not begun
        """Whether the next white space is dropped."""

    def push(self, text: str) -> list[Delta]:
        """Process the next piece of text. Returns the deltas that are final."""
        self._text += text
        deltas: list[Delta] = []
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            self._reason(deltas)
        if self._state == "content":
            self._answer(deltas)
        return deltas

    def finish(self) -> list[Delta]:
        """Process the end of the text. Returns the text that was held back."""
        text, self._text = self._text, ""
        if self._state == "reasoning":
            text = text.rstrip()
            return [Reasoning(text)] if text else []
        if self._trim:
            text = text.lstrip()
        return [Content(text)] if text else []

    def _start(self) -> None:
        text = self._text.lstrip()
        if text.startswith(OPEN):
            self._text = text[len(OPEN) :]
            self._state, self._trim = "reasoning", True
        elif not OPEN.startswith(text):
            self._state = "content"

    def _reason(self, deltas: list[Delta]) -> None:
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text
        text, closed, rest = self._text.partition(CLOSE)
        if closed:
            text = text.rstrip()
            self._text, self._state, self._trim = rest, "content", True
        else:
            # The text may end with a part of the tag, or with white space before the tag.
            text = text[: len(text) - num_held(text, CLOSE)].rstrip()
            self._text = self._text[len(text) :]
        if text:
            deltas.append(Reasoning(text))

    def _answer(self, deltas: list[Delta]) -> None:
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text
        if self._text:
            deltas.append(Content(self._text))
            self._text = ""
