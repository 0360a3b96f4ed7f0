"""Phrase groups with alternations, and the random draws that fill them.

A line such as ``(What|Which) (town|city) does {s} live in?`` stands for all its alternatives. A line that begins
with ``~`` is held out: it is never used in training, only in the second column of the evaluation.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_ALTERNATION = re.compile(r"\(([^()|]*(?:\|[^()|]*)+)\)")
_SLOT = re.compile(r"\{(\w+)\}")


def is_held(value: str) -> bool:
    """Whether a value (name, number, key, …) belongs to the held-out fifth of its list."""
    return hashlib.sha256(value.lower().encode()).digest()[0] % 5 == 0


class Phrases:
    """A group of interchangeable phrasings, split into trained and held-out lines."""

    def __init__(self, *lines: str) -> None:
        self.train = tuple(line for line in lines if not line.startswith("~"))
        self.held = tuple(line[1:] for line in lines if line.startswith("~"))
        if not self.train:
            raise ValueError("a phrase group needs at least one trained line")


@dataclass(frozen=True)
class Pool:
    """An open list of values: fixed words, plus invented ones with probability ``invented``."""

    words: tuple[str, ...]
    invent: Callable[[random.Random], str] | None = None
    invented: float = 0.5


class Draw:
    """Random choices for one example.

    ``held_values`` draws every value of an open list from its held-out fifth, ``held_templates`` uses held-out
    lines of every phrase group that has some. Training uses neither.
    """

    def __init__(self, rng: random.Random, held_values: bool = False, held_templates: bool = False) -> None:
        self.rng = rng
        self.held_values = held_values
        self.held_templates = held_templates

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.rng.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, uniformly."""
        return options[self.rng.randrange(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different options in random order."""
        return self.rng.sample(list(options), count)

    def open(self, make: Callable[[], str]) -> str:
        """A value from ``make`` that lies on this draw's side of the split."""
        for _ in range(1000):
            value = make()
            if is_held(value) == self.held_values:
                return value
        raise ValueError("no value on the wanted side of the split")

    def value(self, pool: Pool) -> str:
        """A value of the pool on this draw's side of the split."""
        if pool.invent is not None and self.chance(pool.invented):
            invent = pool.invent
            return self.open(lambda: invent(self.rng))
        return self.open(lambda: self.pick(pool.words))

    def values(self, pool: Pool, count: int) -> list[str]:
        """``count`` different values of the pool."""
        found: list[str] = []
        while len(found) < count:
            value = self.value(pool)
            if value not in found:
                found.append(value)
        return found

    def number(self, low: int, high: int) -> int:
        """A number in the range; numbers of two digits or more keep to this draw's side of the split."""
        if high < 20:
            return self.rng.randint(low, high)
        low = max(low, 10) if self.held_values else low
        while True:
            number = self.rng.randint(low, high)
            if (number < 10 and not self.held_values) or is_held(str(number)) == self.held_values:
                return number

    def phrase(self, group: Phrases, **slots: object) -> str:
        """One line of the group with its alternations resolved and its slots filled."""
        lines = group.held if self.held_templates and group.held else group.train
        return self.fill(self.pick(lines), **slots)

    def fill(self, line: str, **slots: object) -> str:
        """The line with its alternations resolved at random and its slots filled."""
        while True:
            resolved = _ALTERNATION.sub(lambda match: self.pick(match[1].split("|")), line)
            if resolved == line:
                break
            line = resolved
        return _SLOT.sub(lambda match: str(slots[match[1]]), line)


def join(words: Sequence[str], last: str = " and ") -> str:
    """``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + last + words[-1]


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
