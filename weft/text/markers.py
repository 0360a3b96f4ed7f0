"""Markers in a text that arrives in pieces: how much of it must be held back because a marker may be beginning."""

from __future__ import annotations


def num_held(text: str, marker: str) -> int:
    """Characters at the end of the text that may be the beginning of the marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def num_blank(text: str, start: int = 0) -> int:
    """Characters of white space from `start` on."""
    return len(text) - start - len(text[start:].lstrip())
