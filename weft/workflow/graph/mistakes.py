"""What is wrong with a graph: every mistake, each with its place, in one error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.abi.errors import InvalidRequest
from weft.core.wording import plural

MAX_SHOWN = 50
"""Mistakes that a message lists; it counts the others."""


class Mistake(NamedTuple):
    """A mistake in a graph: its place and what is wrong there."""

    place: str
    """Such as `reply.messages[0].content`: the id of a node and what in it. In a flow file and line stand before it."""
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class InvalidGraph(InvalidRequest):
    """A graph with mistakes. Nothing of it has run. `param` is the place of the first one."""

    def __init__(self, mistakes: Sequence[Mistake]):
        super().__init__(listing("The workflow has", mistakes, MAX_SHOWN), mistakes[0].place)
        self.mistakes = tuple(mistakes)


def listing(what: str, mistakes: Sequence[Mistake], max_shown: int) -> str:
    """A message that lists the first mistakes and counts the others."""
    more = len(mistakes) - max_shown
    lines = [str(mistake) for mistake in mistakes[:max_shown]] + ([f"and {more} more"] if more > 0 else [])
    count = plural(len(mistakes), "mistake")
    return f"{what} {count}:\n" + "\n".join(f"  {line}" for line in lines)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at names like this one, to follow a message; empty where there is none."""
    near = difflib.get_close_matches(name[:100], list(names), n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""
