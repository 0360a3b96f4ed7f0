"""Limits of chat templates on steps, characters and sizes. Templates are untrusted: they come with models and requests.

Owns the budget of one rendering and the estimation of sizes. Jinja's sandbox keeps a template from reaching Python, but
not from endless loops or exponential strings. `weft.tokenizers.template_env` charges the budget before each operation
that costs more than a step. No clock is involved, so the same template and input always give the same result.
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
"""Limit of the rendered prompt and of every intermediate string."""
MAX_STEPS = 1_000_000
"""Limit of loop iterations and calls of one rendering. A chat of a thousand messages needs about ten thousand."""
STEPS_PER_CALL = 4
"""A call of a macro, a filter or a method takes about four times as long as an iteration."""
CHARS_PER_STEP = 128
"""Characters copied or searched that cost one step."""
CHARS_PER_ENTRY = 8
"""Cost of a container's entry, in characters."""
MAX_RANGE = 100_000
MAX_INT_BITS = 4096
MAX_FORMAT_DIGITS = 5
"""Maximum digits of a width or precision in a format string."""

_LONG_NUMBER = re.compile(rf"\d{{{MAX_FORMAT_DIGITS + 1},}}|\*")

_NUMBER = re.compile(r"\d+")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class TemplateLimit(Exception):
    """A template exceeded a limit, which the message names."""


class TextLimit(TemplateLimit):
    """It made too long a text: no model has such a context."""


class TemplateBudget:
    """The remaining steps of one rendering."""

    def __init__(self, max_steps: int = MAX_STEPS):
        self._max = max_steps
        self._left = max_steps

    def spend(self, chars: int = 0, steps: int = 1) -> None:
        """Charge the steps for this many characters. Raises `TemplateLimit`."""
        self._left -= steps + chars // CHARS_PER_STEP
        if self._left < 0:
            raise TemplateLimit(
                f"the template does more than {self._max:,} steps (loop iterations, calls, and "
                f"{CHARS_PER_STEP} characters handled each count as one)"
            )


_budget: contextvars.ContextVar[TemplateBudget | None] = contextvars.ContextVar("weft_template_budget", default=None)


@contextmanager
def budget(limit: TemplateBudget) -> Iterator[None]:
    """Charge template operations inside the context to `limit`."""
    token = _budget.set(limit)
    try:
        yield
    finally:
        _budget.reset(token)


def spend(chars: int = 0, steps: int = 1) -> None:
    """Charge the current budget, if there is one."""
    current = _budget.get()
    if current is not None:
        current.spend(chars, steps)


def count_iterations(values: Iterable[T]) -> Iterator[T]:
    """Iterate over the values, charging each."""
    for value in values:
        spend()
        yield value


def size(value: object) -> int:
    """Cost of scanning a value, in characters, without its entries."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | range | Mapping | set | frozenset):
        return CHARS_PER_ENTRY * len(value)
    return 0


def paid(value: T) -> T:
    """Charge the scan of a value and return the value."""
    chars = size(value)
    if chars > CHARS_PER_STEP:
        spend(chars)
    return value


def made(value: T) -> T:
    """Charge a value that the template has created and return it. Raises `TemplateLimit` if it is too large."""
    check_size(size(value))
    return paid(value)


def check_size(chars: int) -> None:
    """Raise `TemplateLimit` for a value of too many characters."""
    if chars > MAX_OUTPUT_CHARS:
        raise TextLimit(f"the template makes a text of more than {MAX_OUTPUT_CHARS:,} characters")


def weigh(value: object) -> int:
    """Estimate of the characters of `str(value)` or of its JSON; charges the count.

    Shared parts count each time they occur, as they would be written, so exponentially nested values are refused before
    they are written.
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
    """Raise `TemplateLimit` for huge integers."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateLimit(f"the template computes a number of more than {MAX_INT_BITS} bits")


def check_format(pattern: str, arguments: object, *, may_nest: bool = False) -> None:
    """Charge the result of a format string, and refuse huge widths before padding.

    With `may_nest`, a field's width may come from an argument (`{:{}}`); that is refused too.
    """
    if may_nest and _NESTED_FIELD.search(pattern):
        raise TemplateLimit("the template formats with a width that is itself a field")
    if _LONG_NUMBER.search(pattern):
        raise TemplateLimit(f"the template formats with a width of more than {MAX_FORMAT_DIGITS} digits, or with '*'")
    places = pattern.count("%") + pattern.count("{")
    widest = max((int(digits) for digits in _NUMBER.findall(pattern)), default=0)
    spend(len(pattern) + places * (weigh(arguments) + widest))


def largest_int(values: Iterable[object]) -> int:
    """The largest absolute value of the integers among the values, at least 0."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)
