"""What is wrong with a graph: every mistake, each with its place, in one error."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from weft.abi.errors import InvalidRequest
from weft.core.wording import plural

MAX_SHOWN = 50
"""Mistakes that a message lists; it counts the others."""
MAX_COMPARED = 1000
"""Names that one is compared with for a hint."""
MAX_COMPARISONS = 50_000
"""Of names in one check; each takes up to 30 microseconds, so all of them about a second."""
MAX_LISTED = 20
"""Names that a message lists."""

_comparisons_left: ContextVar[int | None] = ContextVar("comparisons_left", default=None)


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


@contextmanager
def bounded_hints() -> Iterator[None]:
    """Within the block `nearest` compares `MAX_COMPARISONS` names and gives no hints afterwards: a graph may have
    thousands of mistakes, of which few are read. A block within another one shares its bound. Also a decorator."""
    if _comparisons_left.get() is not None:
        yield
        return
    token = _comparisons_left.set(MAX_COMPARISONS)
    try:
        yield
    finally:
        _comparisons_left.reset(token)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at names like this one, to follow a message; empty where there is none."""
    compared = list(itertools.islice(names, MAX_COMPARED))
    left = _comparisons_left.get()
    if left is not None:
        if left <= 0:
            return ""
        _comparisons_left.set(left - len(compared))
    near = difflib.get_close_matches(name[:100], compared, n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def listed(names: Sequence[str]) -> str:
    """Names in a message; of many the first ones."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
