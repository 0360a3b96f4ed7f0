"""Parts of a text by tokens. They begin and end between characters, so that the parts are the text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weft.tokenizers.token_bytes import byte_level_bytes, sentencepiece_bytes
from weft.workflow.graph.values import PartRanges


def parts_of(pieces: Sequence[bytes], ranges: PartRanges) -> list[str]:
    """The parts of the text whose tokens have these bytes."""
    whole = b"".join(pieces)
    ends = [0, *itertools.accumulate(map(len, pieces))]
    found = ranges(ends, lambda at: not _continues(whole, at))
    return [whole[start:end].decode(errors="replace") for start, end in found]


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
