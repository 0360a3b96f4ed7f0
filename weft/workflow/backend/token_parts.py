"""Parts of a text by tokens. A character in several tokens is in the part in which it begins, so that the parts are the
text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from weft.tokenizers.token_bytes import byte_level_bytes, sentencepiece_bytes

Ranges = Callable[[int], list[tuple[int, int]]]
"""Which of so many tokens make each part, from and to (exclusive)."""


def parts_of(pieces: Sequence[bytes], ranges: Ranges) -> list[str]:
    """The parts of the text whose tokens have these bytes."""
    whole = b"".join(pieces)
    ends = [0, *itertools.accumulate(map(len, pieces))]
    cuts = {len(whole): len(whole)}
    found = []
    for start, end in ranges(len(pieces)):
        for at in (ends[start], ends[end]):
            if at not in cuts:
                cuts[at] = next(cut for cut in range(at, len(whole) + 1) if not _continues(whole, cut))
        found.append(whole[cuts[ends[start]] : cuts[ends[end]]].decode(errors="replace"))
    return found


def pieces_of(tokens: Sequence[str], text: str) -> list[bytes] | None:
    """The bytes of a text's tokens, from their strings in the vocabulary; None where these are of no family that is
    known."""
    whole = text.encode(errors="replace")
    for bytes_of in (byte_level_bytes, sentencepiece_bytes):
        pieces = [bytes_of(token) for token in tokens]
        made = b"".join(pieces)
        if made == whole:
            return pieces
        if made == b" " + whole and pieces[0].startswith(b" "):  # SentencePiece adds one
            return [pieces[0][1:], *pieces[1:]]
    return None


def _continues(text: bytes, at: int) -> bool:
    """Whether a byte is inside a character."""
    return at < len(text) and text[at] & 0xC0 == 0x80
