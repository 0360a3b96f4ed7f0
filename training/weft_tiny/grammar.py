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
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

TOP = 6
"""The hardest level of examples."""

_ALTERNATION = re.compile(r"\(([^()|]*(?:\|[^()|]*)+)\)")
_SLOT = re.compile(r"\{(\w+)\}")
_DROPPED = re.compile(r"(?<=[\w,] )(?:the|a|an|is|of|me|for|to|this|these|does|do|all|my|please) (?=[\w{])")
# fmt: off
_SYNONYMS = {
    "text": "passage|paragraph|note|document|sentence|snippet", "item": "thing|product|article",
    "items": "things|goods|products",
    "list": "table|overview", "extract": "pull out|collect|gather|pick|take|copy",
    "Extract": "Pull out|Collect|Gather|Take|Copy",
    "find": "locate|get|search", "Find": "Locate|Get|Search", "Tell": "Show|Give", "get": "fetch|obtain|find",
    "Get": "Fetch|Obtain|Find",
    "Look up": "Check|Fetch|Find|Search for|Query", "fields": "keys|entries|properties|attributes",
    "keys": "fields|properties|attributes",
    "answer": "reply|response", "Answer": "Reply|Respond", "question": "query|problem", "city": "town|place",
    "town": "city|village",
    "story": "tale|short story", "short": "brief|little", "Return": "Output|Give|Produce|Print|Write",
    "Write": "Compose|Make|Produce",
    "cost": "sell for", "costs": "sells for|is sold for", "name": "first name", "likes": "loves|enjoys|prefers",
    "lives": "resides|stays|dwells",
    "Read": "See|Study|Check|Consider", "value": "content|entry", "called": "named|known as",
    "Calculate": "Figure out|Determine",
    "begin": "start|open", "end": "finish|stop", "every": "each", "Summarize": "Recap|Describe", "What": "Which",
    "is": "was",
    "need": "want|would like", "works": "is employed", "person": "man|woman", "expensive": "costly",
    "record": "object", "object": "record",
}
# fmt: on
_SYNONYM = re.compile(r"(?<![\w{'])(?:" + "|".join(_SYNONYMS) + r")(?![\w}'])")


def is_held(value: str) -> bool:
    """Whether a value (name, number, key, …) belongs to the held-out fifth of its list."""
    return hashlib.sha256(value.lower().encode()).digest()[0] % 5 == 0


@lru_cache(maxsize=10_000)
def _form(line: str) -> re.Pattern[str]:
    """A regular expression for all texts of a line: any alternative, any value in each slot."""
    shape = ""
    for part in re.split(r"(\([^()]*\|[^()]*\)|\{\w+\})", line):
        if part.startswith("(") and "|" in part:
            shape += "(?:" + "|".join(map(re.escape, part[1:-1].split("|"))) + ")"
        else:
            shape += ".*" if part.startswith("{") else re.escape(part)
    return re.compile(shape, re.DOTALL)


class Phrases:
    """A group of interchangeable phrasings, split into trained and held-out lines."""

    def __init__(self, *lines: str) -> None:
        self.train = tuple(line for line in lines if not line.startswith("~"))
        self.held = tuple(line[1:] for line in lines if line.startswith("~"))
        if not self.train:
            raise ValueError("a phrase group needs at least one trained line")
        self._forms = tuple(_form(line) for line in self.held)

    def also(self, *lines: str) -> Phrases:
        """The group with further trained lines."""
        return Phrases(*self.train, *lines, *(f"~{line}" for line in self.held))

    def is_held(self, text: str) -> bool:
        """Whether the text has the form of a held-out line."""
        return any(form.fullmatch(text) for form in self._forms)


@dataclass(frozen=True)
class Pool:
    """An open list of values: fixed words, plus invented ones with probability ``invented``."""

    words: tuple[str, ...]
    invent: Callable[[random.Random], str] | None = None
    invented: float = 0.5


class Draw:
    """Random choices for one example.

    ``level``, from 1 to `TOP`, says how hard the example may be; a kind decides what that means. ``held_values``
    draws every value of an open list from its held-out fifth, ``held_templates`` uses held-out lines of every phrase
    group that has some. Training uses neither.
    """

    def __init__(
        self, rng: random.Random, held_values: bool = False, held_templates: bool = False, level: int = TOP
    ) -> None:
        self.rng = rng
        self.level = level
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
        if self.held_templates:
            return self.fill(self.pick(group.held or group.train), **slots)
        while True:
            line = self.fill(self.vary(self.pick(group.train)))
            if not group.is_held(line):
                return self.fill(line, **slots)

    def vary(self, line: str) -> str:
        """Sometimes drop small words of a line or replace a word, so that the model does not rely on a wording."""
        if self.chance(0.65):
            return line
        if self.chance(0.4):
            return _DROPPED.sub(lambda match: "" if self.chance(0.5) else match[0], line)
        return _SYNONYM.sub(lambda match: self._synonym(match[0]) if self.chance(0.5) else match[0], line)

    def _synonym(self, word: str) -> str:
        return self.pick(_SYNONYMS[word].split("|"))

    def fill(self, line: str, **slots: object) -> str:
        """The line with its alternations resolved at random and its slots filled."""
        while True:
            resolved = _ALTERNATION.sub(lambda match: self.pick(match[1].split("|")), line)
            if resolved == line:
                break
            line = resolved
        return _SLOT.sub(lambda match: str(slots[match[1]]), line) if slots else line


def join(words: Sequence[str], last: str = " and ") -> str:
    """``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + last + words[-1]


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
