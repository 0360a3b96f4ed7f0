"""Log-probabilities in the forms of the completion API."""

from __future__ import annotations

import pytest

from weft.endpoints.logprobs import CompletionLogprobsWriter

PIECES = [b"<s>", b" Hello", b" you", b" "]


@pytest.mark.parametrize(
    ("tokens", "strips", "offsets"),
    [
        ([1, 2], True, [0, 5]),
        ([0, 1, 2], True, [0, 0, 5]),
        ([1, 2], False, [0, 6]),
        ([3, 2], True, [0, 0]),
    ],
)
def test_offsets_are_those_of_the_text(tokens: list[int], strips: bool, offsets: list[int]) -> None:
    """Tokenizers of SentencePiece drop the space that a text begins with."""
    writer = CompletionLogprobsWriter(PIECES.__getitem__, lambda token: token > 0, 0, strips_space=strips)
    assert writer.write(tokens, [None] * len(tokens)).text_offset == offsets
