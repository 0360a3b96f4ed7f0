"""What a chat template may spend: steps, characters, sizes. None is trusted: they come with models and requests.

Owns the budget of one rendering and the sizes of values. Jinja's sandbox stops a template from reaching Python; it
does not stop it from looping for ever, or from doubling a string forty times. `weft.tokenizers.template_env` calls it
before each operation that costs more than a step. Nothing here reads a clock: the same template with the same input
always ends the same way.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
"""Of the rendered prompt, and of every string on the way there."""
MAX_STEPS = 1_000_000
"""Loop iterations and calls of one rendering. A chat of a thousand messages needs some ten thousand."""
STEPS_PER_CALL = 4
"""A call of a macro, a filter or a method takes about four times as long as an iteration."""
CHARS_PER_STEP = 128
"""Characters that may be copied or searched for the price of one step."""
CHARS_PER_ENTRY = 8
"""What an entry of a container costs, in characters."""
MAX_RANGE = 100_000
MAX_INT_BITS = 4096
MAX_FORMAT_DIGITS = 5
"""Digits of a width or precision in a format string."""

_LONG_NUMBER = re.compile(rf"\d{{{MAX_FORMAT_DIGITS + 1},}}|\*")

_NUMBER = re.compile(r"\d+")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class TemplateLimit(Exception):
    """A template asked for more than it may have; the message says of what."""


class Budget:
    """What one rendering has left."""

    def __init__(self, max_steps: int = MAX_STEPS):
        self._max = max_steps
        self._left = max_steps

    def spend(self, chars: int = 0, steps: int = 1) -> None:
        """Pay for steps that handle so many characters. Raises `TemplateLimit`."""
        self._left -= steps + chars // CHARS_PER_STEP
        if self._left < 0:
            raise TemplateLimit(
                f"the template does more than {self._max:,} steps (loop iterations, calls, and "
                f"{CHARS_PER_STEP} characters handled each count as one)"
            )


_budget: contextvars.ContextVar[Budget | None] = contextvars.ContextVar("weft_template_budget", default=None)


@contextmanager
def budget(limit: Budget) -> Iterator[None]:
    """Everything a template does inside is paid from `limit`."""
    token = _budget.set(limit)
    try:
        yield
    finally:
        _budget.reset(token)


def spend(chars: int = 0, steps: int = 1) -> None:
    """Pay from the current budget, if there is one."""
    current = _budget.get()
    if current is not None:
        current.spend(chars, steps)


def count_iterations(values: Iterable[T]) -> Iterator[T]:
    """The values, each paid for."""
    for value in values:
        spend()
        yield value


def size(value: object) -> int:
    """What looking through a value costs, in characters, without looking into its entries."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | range | Mapping | set | frozenset):
        return CHARS_PER_ENTRY * len(value)
    return 0


def paid(value: T) -> T:
    """The value, once what looking through it costs is paid."""
    chars = size(value)
    if chars > CHARS_PER_STEP:
        spend(chars)
    return value


def made(value: T) -> T:
    """A value that the template has made: paid for, and refused where it is too large to go on with."""
    check_size(size(value))
    return paid(value)


def check_size(chars: int) -> None:
    """Refuse a value of so many characters, before or after it is made."""
    if chars > MAX_OUTPUT_CHARS:
        raise TemplateLimit(f"the template makes a text of more than {MAX_OUTPUT_CHARS:,} characters")


def weigh(value: object) -> int:
    """Roughly the characters that `str(value)` or its JSON would have, paying as it counts.

    Shared parts count each time they occur, as they would be written: a list that holds itself twice, thirty times
    over, is refused before anything is written.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str | bytes):
            chars = len(item) + 2
        elif isinstance(item, Mapping):
            chars = 2
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            chars = 2
            stack += item
        else:
            chars = 8
        spend(chars)
        total += chars
    return total


def check_number(value: object) -> None:
    """Refuse integers that are only good for burning time."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateLimit(f"the template computes a number of more than {MAX_INT_BITS} bits")


def check_format(pattern: str, arguments: object, *, may_nest: bool = False) -> None:
    """Pay for what a format string makes of its arguments, and refuse huge widths before they are padded.

    With `may_nest`, a field may take its width from an argument (`{:{}}`); that is refused too.
    """
    if may_nest and _NESTED_FIELD.search(pattern):
        raise TemplateLimit("the template formats with a width that is itself a field")
    if _LONG_NUMBER.search(pattern):
        raise TemplateLimit(f"the template formats with a width of more than {MAX_FORMAT_DIGITS} digits, or with '*'")
    places = pattern.count("%") + pattern.count("{")
    widest = max((int(digits) for digits in _NUMBER.findall(pattern)), default=0)
    spend(len(pattern) + places * (weigh(arguments) + widest))


def largest_int(values: Iterable[object]) -> int:
    """The largest magnitude of the integers among the values, at least 0."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)
