"""Words of messages that depend on a number."""

from __future__ import annotations


def plural(count: float, noun: str) -> str:
    """The count and its noun, which takes an s unless the count is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
