"""Markers in streamed text: how much text must be held back because a marker may have begun."""

from __future__ import annotations


def num_held(text: str, marker: str) -> int:
    """Length of the text's suffix that may be the start of the marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def num_blank(text: str, start: int = 0) -> int:
    """Number of white-space characters from `start` on."""
    return len(text) - start - len(text[start:].lstrip())
