"""Errors of peers as text for reports."""

from __future__ import annotations

SHOWN_CHARS = 200


def one_line(error: BaseException) -> str:
    """An error as one line of at most `SHOWN_CHARS` characters; its class where it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
