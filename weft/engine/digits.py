"""The bound on digits of numbers in JSON under a grammar.

A JSON schema cannot bound them: `maximum` changes the values that are allowed, and llguidance has no other keyword. So
tokens that would make a run of digits longer are taken out of the mask, where the grammar allows other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
_DIGITS = b"0123456789"
_QUOTE, _BACKSLASH, _ZERO, _NINE = b'"\\09'


class DigitTokens:
    """The tokens of a vocabulary by the number of digits that they begin with."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self.token_bytes = token_bytes
        num_words = -(-len(token_bytes) // 32)
        leading = np.zeros(num_words * 32, np.int64)
        for token, data in enumerate(token_bytes):
            if data[:1].isdigit():
                leading[token] = len(data) - len(data.lstrip(_DIGITS))
        self.beyond: list[U32] = [
            np.packbits(leading > count, bitorder="little").view("<u4").astype(np.uint32)
            for count in range(int(leading.max(initial=0)))
        ]
        """[k]: the tokens that begin with more than k digits, as bits, [ceil(V / 32)] words."""


class DigitRun:
    """The digits at the end of one JSON text, outside strings; at most `limit` in a row."""

    def __init__(self, tokens: DigitTokens, limit: int):
        self._tokens = tokens
        self._limit = limit
        self._length = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, token: int) -> None:
        """Process the next token of the text."""
        known = self._tokens.token_bytes
        for byte in known[token] if token < len(known) else b"":
            if self._is_escaped:
                self._is_escaped = False
            elif byte == _QUOTE:
                self._in_string = not self._in_string
            elif self._in_string:
                self._is_escaped = byte == _BACKSLASH
            self._length = self._length + 1 if _ZERO <= byte <= _NINE and not self._in_string else 0

    def bound(self, mask: U32) -> None:
        """Clear the tokens that would exceed the limit in a mask of allowed tokens, [ceil(V / 32)] words; none if no
        other token is allowed, such as in a number that must not be below a large `minimum`."""
        room = max(0, self._limit - self._length)
        if self._in_string or not self._length or room >= len(self._tokens.beyond):
            return
        left = mask & ~self._tokens.beyond[room]
        if left.any():
            mask[:] = left
