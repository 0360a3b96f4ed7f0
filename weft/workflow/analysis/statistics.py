"""How long values are, how often bodies run: from what was measured, from rows, or else from defaults."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from weft.workflow.graph.mistakes import Mistake, nearest
from weft.workflow.graph.nodes import MAX_ITEMS, ROUNDS_LIMIT

T = TypeVar("T", bound=Hashable)

DEFAULT_OUTPUT_TOKENS = 256
"""Of an answer without `max_tokens`; with it, half of that where it is less."""
DEFAULT_VALUE_TOKENS = 64
"""Of an input, or of what a function, a program or a client returns."""
DEFAULT_ITEMS = 8
"""Of a list that a map goes through."""
SAMPLED_PART = 0.1
MAX_SAMPLED_ROWS = 30


MAX_TOKENS = 10_000_000
"""Of a value; more would be more than any engine holds, and more than costs can be counted with."""
_SUM_SLACK = 1e-6
"""By which shares that are rounded may be more than all rows."""


class NodeStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of a node, or of an input, by measurement. Means over rows; absent: not known."""

    output_tokens: float | None = None
    """Of its value: of an answer, or of any other text."""
    items: float | None = None
    """Of the list that a map goes through."""
    rounds: float | None = None
    """Of a loop."""
    shares: dict[str, float] | None = None
    """Of a switch: the part of the rows that takes each case, by its place."""


_RANGES = {"output_tokens": (0, MAX_TOKENS), "items": (0, MAX_ITEMS), "rounds": (1, ROUNDS_LIMIT)}
"""Of means: the least and the most."""


def range_mistakes(name: str, fields: Any) -> Iterator[Mistake]:
    """What is wrong with the figures of a node or an input."""
    if not isinstance(fields, Mapping):
        yield Mistake(name, f"an object is needed, with {', '.join(NodeStatistics.__struct_fields__)}")
        return
    for field, value in fields.items():
        place = f"{name}.{field}"
        if field in _RANGES:
            least, most = _RANGES[field]
            if value is not None and not _is_within(value, least, most):
                yield Mistake(place, f"is {value!r:.60}; a number from {least} to {most:,} is needed")
        elif field != "shares":
            known = NodeStatistics.__struct_fields__
            yield Mistake(place, f"there is no such figure; there are {', '.join(known)}.{nearest(str(field), known)}")
        elif isinstance(value, Mapping):
            yield from _share_mistakes(place, value)
        elif value is not None:
            yield Mistake(place, "an object is needed, with the part of the rows by case")


def _share_mistakes(place: str, shares: Mapping[str, Any]) -> Iterator[Mistake]:
    wrong = [case for case, share in shares.items() if not _is_within(share, 0, 1)]
    for case in wrong:
        yield Mistake(f"{place}.{case}", f"is {shares[case]!r:.60}; a number from 0 to 1 is needed")
    if not wrong and (total := sum(shares.values())) > 1 + _SUM_SLACK:
        yield Mistake(place, f"the shares are {total:g} together; at most 1 is needed")


def _is_within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


class RowValue(NamedTuple):
    """An input in each row."""

    tokens: tuple[int, ...]
    """[rows]"""
    classes: tuple[int, ...]
    """[rows] equal where the values are equal; counted up from 0."""
    least: Callable[[], Sequence[int]] | None = None
    """[classes, or classes of items] tokens that are surely a value's own; None: the values are not known."""
    lengths: tuple[int, ...] | None = None
    """[rows] items of a list, of which `tokens` are the mean; None: it is no list that a map goes through."""
    items: tuple[int, ...] = ()
    """[items of all rows] equal where items are equal, as `classes`."""


class Statistics:
    """Known figures first, stored by path of the node or name of the input; then defaults."""

    def __init__(self, known: Mapping[str, Any] | None = None):
        """Raises `msgspec.ValidationError` for an unknown field; `range_mistakes` has found what else is wrong."""
        self._known = {name: msgspec.convert(fields, NodeStatistics) for name, fields in (known or {}).items()}

    def output_tokens(self, path: str, request: Mapping[str, Any]) -> int:
        """Expected tokens of an answer, at least 1; `request` may bound them."""
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        known = self._of(path).output_tokens
        if known is not None:
            return max(1, round(known) if limit is None else min(round(known), limit))
        return DEFAULT_OUTPUT_TOKENS if limit is None else max(1, min(DEFAULT_OUTPUT_TOKENS, limit // 2))

    def value_tokens(self, path: str, default: int = DEFAULT_VALUE_TOKENS) -> int:
        """Expected tokens of another value."""
        known = self._of(path).output_tokens
        return default if known is None else max(0, round(known))

    def input_value(self, name: str, num_rows: int) -> RowValue:
        """An input of rows that are not there yet: as long as known, and another one in each row."""
        return RowValue((self.value_tokens(name),) * num_rows, tuple(range(num_rows)))

    def items(self, path: str, default: float | None = None) -> float:
        """Expected items of the list that a map goes through; `default` is what the graph says of it."""
        known = self._of(path).items
        if known is not None:
            return known
        return DEFAULT_ITEMS if default is None else default

    def rounds(self, path: str, max_rounds: int, ends_early: bool) -> float:
        """Expected rounds of a loop: without an end of its own all, else half of them where nothing is known."""
        known = self._of(path).rounds
        if known is not None:
            return max(1.0, min(known, max_rounds))
        return (max_rounds + 1) / 2 if ends_early else max_rounds

    def share(self, path: str, case: str, num_cases: int) -> float:
        """The part of the rows that takes a case of a switch; equal parts where nothing is known."""
        known = self._of(path).shares
        return 1.0 / num_cases if known is None else known.get(case, 0.0)

    def _of(self, path: str) -> NodeStatistics:
        return self._known.get(path, _NOTHING)


_NOTHING = NodeStatistics()


def sampled_rows(num_rows: int) -> tuple[int, ...]:
    """The rows to run first where nothing is known of a workflow (Helium, section 5): a tenth, 1 to 30, evenly spread.
    Their results are results of the run."""
    count = min(num_rows, max(1, min(MAX_SAMPLED_ROWS, round(num_rows * SAMPLED_PART))))
    return tuple(index * num_rows // count for index in range(count))


def row_value(values: Sequence[Any], count: Callable[[str], int]) -> RowValue:
    """Lengths and classes of one input over the rows. `count` gives the tokens of a text; a value that is not a text
    stands in prompts as JSON. Equal values are counted once."""
    texts, numbers = _classes(
        value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values
    )
    tokens = [count(text) for text in texts]
    return RowValue(
        tuple(tokens[number] for number in numbers), numbers, functools.cache(lambda: _own_tokens(texts, count))
    )


def list_value(lists: Sequence[Sequence[str]], count: Callable[[str], int]) -> RowValue:
    """Mean lengths of the items of a list over the rows, and classes of the lists and of the items."""
    texts, items = _classes(item for each in lists for item in each)
    tokens = [count(text) for text in texts]
    _, classes = _classes(map(tuple, lists))
    ends = itertools.accumulate(map(len, lists), initial=0)
    means = [sum(tokens[item] for item in items[a:b]) / max(1, b - a) for a, b in itertools.pairwise(ends)]
    own = functools.cache(lambda: _own_tokens(texts, count))
    return RowValue(tuple(map(round, means)), classes, own, tuple(map(len, lists)), items)


def _classes(values: Iterable[T]) -> tuple[list[T], tuple[int, ...]]:
    """The different values, and which of them each one is."""
    classes: dict[T, int] = {}
    numbers = tuple(classes.setdefault(value, len(classes)) for value in values)
    return list(classes), numbers


def _own_tokens(texts: Sequence[str], count: Callable[[str], int]) -> list[int]:
    """[texts] tokens that a tree of all the texts has for each, less one that the text before may end with. Of any of
    the texts it has no fewer: in order, a text has no more in common with an earlier one than with the next before."""
    own = [0] * len(texts)
    before = ""
    for number in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[number]
        own[number] = max(0, count(text[common_prefix(before, text) :]) - 1)
        before = text
    return own


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements are equal, by halving: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
