"""Pieces of a streamed answer: content, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Calls are numbered from 0."""

    index: int
    name: str
    id: str = ""
    """The model's id of the call, or empty."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces concatenate to the JSON text that the model generated."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge neighbours of one kind and drop empty ones."""
    result: list[Delta] = []
    texts: list[str] = []
    """Of the last one, if it is a piece of text: joined once, since a call may come character by character."""

    def end_last() -> None:
        if len(texts) > 1:
            last = result[-1]
            assert not isinstance(last, CallStart)
            result[-1] = replace(last, text="".join(texts))
        texts.clear()

    for delta in deltas:
        if isinstance(delta, CallStart):
            end_last()
            result.append(delta)
        elif delta.text:
            last = result[-1] if texts else None
            if type(last) is not type(delta) or getattr(last, "index", 0) != getattr(delta, "index", 0):
                end_last()
                result.append(delta)
            texts.append(delta.text)
    end_last()
    return result
