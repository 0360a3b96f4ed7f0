"""Tokens to text as they come, never splitting a character and never showing what may still be taken back.

Owns the bytes that are not shown yet: the beginning of a character whose rest has not come, and what the engine says
may turn out to belong to a stop string (`hold_bytes`). It knows nothing of requests. Used by the built-in programs.

Byte counts are those of the engine: over the bytes of *all* generated tokens as in `Tokenizer.token_bytes`, special
ones included, also where their text is skipped.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from weft.tokenizers.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing run of tokens.

    Everything that `push` and `finish` return, joined, is what `Tokenizer.decode` makes of all tokens at once, less
    the bytes cut at the end. `continues` says that text comes before these tokens (a prompt), so that a SentencePiece
    vocabulary's leading space is a real one. Each byte is looked at once, but for those held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False):
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._strip_space = tokenizer.strips_leading_space and not continues
        self._pending = bytearray()
        """Bytes not shown yet."""
        self._num_shown = 0
        """Visible bytes that came before those."""
        self._gaps: list[tuple[int, int]] = []
        """Where, in visible bytes, something of how many bytes was left out. Those before what is pending are dropped
        in time."""

    def push(self, tokens: Iterable[int], hold_bytes: int = 0) -> str:
        """Add tokens; the new text that is safe to show. The last `hold_bytes` bytes generated are withheld."""
        for token in tokens:
            self._add(token)
        return self._show(hold_bytes, final=False)

    def finish(self, cut_bytes: int = 0) -> str:
        """The rest of the text, without the last `cut_bytes` bytes generated. An unfinished one is U+FFFD."""
        return self._show(cut_bytes, final=True)

    def _add(self, token: int) -> None:
        if not 0 <= token < len(self._token_bytes):
            return
        text = self._token_bytes[token]
        if token in self._skipped:
            self._gaps.append((self._num_shown + len(self._pending), len(text)))
            return
        if self._strip_space and text:
            self._strip_space = False
            if text.startswith(b" "):
                text = text[1:]
                self._gaps.append((self._num_shown + len(self._pending), 1))
        self._pending += text

    def _show(self, withheld: int, *, final: bool) -> str:
        num_bytes = len(self._pending) - self._visible(withheld)
        if num_bytes <= 0:
            return ""
        text, num_consumed = codecs.utf_8_decode(self._pending[:num_bytes], "replace", final)
        del self._pending[:num_consumed]
        self._num_shown += num_consumed
        if self._gaps:
            self._gaps = [gap for gap in self._gaps if gap[0] >= self._num_shown]
        return text

    def _visible(self, num_bytes: int) -> int:
        """How many visible bytes there are among the last `num_bytes` generated."""
        visible, end = 0, self._num_shown + len(self._pending)
        for at, size in reversed(self._gaps):
            if num_bytes <= end - at:
                break
            visible += end - at
            num_bytes = max(0, num_bytes - (end - at) - size)
            end = at
        return visible + num_bytes


def text_offsets(
    tokenizer: Tokenizer, tokens: Sequence[int], *, start: int = 0, skip_special: bool = False, continues: bool = False
) -> list[int]:
    """Where each token's text begins, in characters from `start`. A token that begins inside a character has that
    character's offset."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special, continues=continues)
    offsets: list[int] = []
    for token in tokens:
        offsets.append(start)
        start += len(detokenizer.push([token]))
    return offsets
