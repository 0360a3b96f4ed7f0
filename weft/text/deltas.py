"""Pieces of a streamed answer: content, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
    for delta in deltas:
        if isinstance(delta, CallStart):
            result.append(delta)
            continue
        if not delta.text:
            continue
        last = result[-1] if result else None
        match last, delta:
            case Content(), Content():
                result[-1] = Content(last.text + delta.text)
            case Reasoning(), Reasoning():
                result[-1] = Reasoning(last.text + delta.text)
            case CallArguments(), CallArguments() if last.index == delta.index:
                result[-1] = CallArguments(last.index, last.text + delta.text)
            case _:
                result.append(delta)
    return result
