"""Guides: one generation's way through its grammar, token by token.

A `Guide` holds every token to its grammar. A `TriggeredGuide` leaves the text free until a marker comes: only then, and
while the marker may be coming, does a token wait for a mask that costs something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher

from weft.core.grammar import Trigger
from weft.engine.digits import DigitRun
from weft.engine.grammar_text import short

_BLANK = b" \t\r\n"
_REASONS = (
    (re.compile("NoExtensionBias"), "no text follows it; do its rules only refer to each other?"),
    (
        re.compile(r"Too many items|Current row has \d+ items"),
        "it allows too many continuations at one place",
    ),
)
"""What llguidance says of grammars that compile and cannot be followed -> the same without its internals."""


class Guide:
    """Follows a grammar from the first token to the last."""

    def __init__(self, matcher: LLMatcher, digits: DigitRun | None = None):
        self._matcher = matcher
        self.digits = digits
        """Bounds the digits of numbers, if the grammar is one of JSON."""
        self.conflict = ""
        """Why no token is left to sample: the request's other fields exclude all that the grammar allows."""

    @property
    def matcher(self) -> LLMatcher | None:
        """What makes the mask of the next token; None while every token is allowed."""
        return self._matcher

    def push(self, token: int) -> bool:
        """Take in the next token; True when nothing may follow any more."""
        self._matcher.consume_token(token)
        if self.digits is not None:
            self.digits.push(token)
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Why the generation cannot go on; empty while it can."""
        return self.conflict or _error_of(self._matcher)


class TriggeredGuide(Guide):
    """Follows a grammar from each marker on.

    `matcher` stands at the beginning of a grammar of texts without the marker, and of texts that end with the marker
    and what must follow it. It is copied when a token may begin the marker, so a token that holds the end of the marker
    and more is masked too, and dropped as soon as the text cannot be at the marker any more.
    """

    def __init__(self, matcher: LLMatcher, trigger: Trigger, token_bytes: Sequence[bytes]):
        super().__init__(matcher)
        self._token_bytes = token_bytes
        self._marker = trigger.marker.encode()
        self._repeats = trigger.repeats
        self._active: LLMatcher | None = None
        self._is_open = False
        """Whether the marker has come, so that the grammar holds."""
        self._tail = b""
        """The end of the text that the next token is read together with."""
        self._held: list[int] = []
        """The last tokens: those that have bytes of the tail."""
        opening, closing = trigger.reasoning or ("", "")
        self._opening, self._closing = opening.encode(), closing.encode()
        self._state = "reasoning" if trigger.in_reasoning else "start" if opening else "free"

    @property
    def matcher(self) -> LLMatcher | None:
        """What makes the mask of the next token; None while every token is allowed."""
        return self._active

    @property
    def error(self) -> str:
        """Why the generation cannot go on; empty while it can."""
        return self.conflict or ("" if self._active is None else _error_of(self._active))

    def push(self, token: int) -> bool:
        """Take in the next token; True when nothing may follow any more."""
        if self._is_open and self._active is not None:
            self._active.consume_token(token)
            return self._active.is_stopped() and self._end_of_match()
        text = self._tail + self._bytes_of(token)
        self._held.append(token)
        if self._state != "free":
            text = self._read_reasoning(text)
            if self._state != "free":
                self._keep(text)
                return False
        return self._read_free(token, text)

    def _read_free(self, token: int, text: bytes) -> bool:
        """Look for the marker in the end of the free text, to which the token belongs."""
        at = text.find(self._marker)
        self._keep(text[at:] if at >= 0 else text[len(text) - _num_held(text, self._marker) :])
        if not self._tail:
            self._active = None
            return False
        if self._active is None:
            self._active = self._begun()
        else:
            self._active.consume_token(token)
        self._is_open = at >= 0
        if not self._is_open and self._active.is_error():
            # No text of the grammar ends so: the next token is free.
            self._active = None
            self._keep(b"")
        return self._is_open and self._active is not None and self._active.is_stopped() and self._end_of_match()

    def _begun(self) -> LLMatcher:
        """A matcher that has read the tail: the marker, or its beginning."""
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(self._held)
        letters = [bytes([byte]) for byte in self._tail]
        if matcher.is_error() and set(letters).issubset(self._token_bytes):
            # Half a character stands in front of the tail, in the same token. It belongs to the free text.
            matcher = self._matcher.deep_copy()
            matcher.consume_tokens([self._token_bytes.index(letter) for letter in letters])
        return matcher

    def _keep(self, tail: bytes) -> None:
        """Read the next token together with the tail."""
        first, size = len(self._held), 0
        while size < len(tail):
            first -= 1
            size += len(self._bytes_of(self._held[first]))
        self._tail = tail
        del self._held[:first]

    def _bytes_of(self, token: int) -> bytes:
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def _end_of_match(self) -> bool:
        """The text is free again, or over: says which."""
        if self._active is not None and self._active.is_error():
            return False
        self._is_open = False
        self._keep(b"")
        if self._repeats:
            self._active = None
        return not self._repeats

    def _read_reasoning(self, text: bytes) -> bytes:
        """Where reasoning begins and ends; what of the text has to be read again with the next token."""
        if self._state == "start":
            text = text.lstrip(_BLANK)
            if text.startswith(self._opening):
                self._state, text = "reasoning", text[len(self._opening) :]
            elif not self._opening.startswith(text):
                self._state = "free"
                return text
            else:
                return text
        at = text.find(self._closing)
        if at < 0:
            return text[len(text) - _num_held(text, self._closing) :]
        self._state = "free"
        return text[at + len(self._closing) :]


def _num_held(text: bytes, marker: bytes) -> int:
    """Bytes at the end of the text that may be the beginning of the marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _error_of(matcher: LLMatcher) -> str:
    if not matcher.is_error():
        return ""
    if "doesn't satisfy the grammar" in matcher.get_error():
        return "the grammar allows no token that can be sampled here"
    # The library's text shows its parser's state; its first line is the cause.
    message = matcher.get_error().partition("<state")[0]
    words = next((words for pattern, words in _REASONS if pattern.search(message)), message)
    return f"the grammar cannot be followed: {short(words)}"
