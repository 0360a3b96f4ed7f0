"""What the tests of parsers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from weft.text.deltas import CallArguments, CallStart, Content, Delta, Reasoning, joined


class Parser(Protocol):
    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def content(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def reasoning(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))


def calls(deltas: Iterable[Delta]) -> list[tuple[str, str]]:
    """Name and arguments of each call. Every piece must belong to the call that was started last."""
    result: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(result)
            result.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            assert delta.index == len(result) - 1
            name, arguments = result[-1]
            result[-1] = name, arguments + delta.text
    return result
