"""What a prefix cache of bounded size has of each prompt, when calls run in a given order."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.workflow.analysis.bounds import answer_nodes
from weft.workflow.analysis.operators import Unrolled
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.analysis.row_prompts import RowPrompts
from weft.workflow.planner.pins import PrefixPin
from weft.workflow.planner.place import PlanEngine

_OUTPUT = -1
_ITEMS = -2
ModelledCall = tuple[int, int, int]
"""Operator, row, engine."""


class PromptSources(NamedTuple):
    """Where the tokens of prompts come from. Expected: calls that not every row makes count in part."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    """Found in the cache, and not continued."""
    continued_tokens: float = 0.0
    """Found in the cache, of the turn that a prompt continues: its prompt and its answer."""

    @property
    def prefill_tokens(self) -> float:
        """Prompt tokens that are neither cached nor continued."""
        return self.prompt_tokens - self.cached_tokens - self.continued_tokens

    def plus(self, other: PromptSources) -> PromptSources:
        """The tokens of both, source by source."""
        return PromptSources(*(a + b for a, b in zip(self, other, strict=True)))


class PlacedPin(NamedTuple):
    """A pin among the calls of a schedule."""

    pin: PrefixPin
    start: int
    """The number of the first call that it is kept for."""
    end: int
    """Behind the last one."""


class _KnownItems(NamedTuple):
    """The first piece of a prompt that is the known item of a map."""

    node: int
    before: list[int]
    """[rows] equal where the prompts before it are."""
    items: list[tuple[int, ...]]
    """[rows] equal where items are equal."""
    depths: list[int]
    """[rows] tokens up to the end of the item."""


def _known_items(path: Sequence[int], prompts: RowPrompts) -> _KnownItems | None:
    for place, node in enumerate(path):
        value = prompts.values[node]
        if value is not None and value.lengths is not None:
            before = prompts.classes[path[place - 1]].tolist() if place else [0] * prompts.num_rows
            ends = itertools.accumulate(value.lengths, initial=0)
            items = [value.items[start:end] for start, end in itertools.pairwise(ends)]
            return _KnownItems(node, before, items, prompts.depths[node].tolist())
    return None


def _changes(pins: Sequence[PlacedPin]) -> dict[int, list[tuple[PrefixPin, bool]]]:
    """By number of a call: the pins that end, and then those that begin, before it."""
    changes: dict[int, list[tuple[PrefixPin, bool]]] = {}
    for placed in pins:
        changes.setdefault(placed.end, []).insert(0, (placed.pin, False))
        changes.setdefault(placed.start, []).append((placed.pin, True))
    return changes


class CacheModel:
    """Replays calls one after the other on engines with a prefix cache each, which lets go the pieces that were used
    longest ago, ends of prompts before their beginnings, and none that is pinned. Pages are whole: of a page that is
    shared in part nothing is found."""

    def __init__(self, unrolled: Unrolled, tree: PrefixTree, prompts: RowPrompts, engines: Sequence[PlanEngine]):
        self._operators = unrolled.operators
        self._paths = tree.paths
        self._engines = engines
        self._tokens = [tokens.tolist() for tokens in prompts.tokens]
        self._classes = [classes.tolist() for classes in prompts.classes]
        self._answers = answer_nodes(unrolled, tree)
        self._prompt_tokens = [prompts.prompt_tokens(number).tolist() for number in range(len(self._operators))]
        self._items = [_known_items(path, prompts) for path in tree.paths]
        self._by_items = [
            prompts.shared_by_items(number, operator.shared_by_items).tolist()
            for number, operator in enumerate(self._operators)
        ]

    def replay(self, calls: Iterable[ModelledCall], pins: Sequence[PlacedPin] = ()) -> list[PromptSources]:
        """[operators] for calls in this order."""
        changes = _changes(pins)
        caches = [_Cache(engine.kv_tokens) for engine in self._engines]
        found = [PromptSources() for _ in self._operators]
        answers = set(self._answers)
        seen: set[tuple[int, int, int]] = set()
        for at, (number, row, engine) in enumerate(calls):
            for pin, begins in changes.get(at, ()):
                change = caches[pin.engine].pin if begins else caches[pin.engine].unpin
                for node in pin.nodes:
                    change((node, 0))
            cache = caches[engine]
            held = 0
            keys = [(node, self._classes[node][row]) for node in self._paths[number]]
            for key in keys:
                if key not in cache:
                    break
                held += self._tokens[key[0]][row]
            page = self._engines[engine].page_size
            prompt = self._prompt_tokens[number][row]
            usable = max(min(held // page * page, prompt - 1), 0)
            self._use(cache, number, row, keys)
            operator = self._operators[number]
            again = operator.items - 1
            alike = max(min(self._by_items[number][row] // page * page, prompt - 1), usable)
            part = operator.calls / operator.items
            if operator.weights is not None:
                part *= operator.weights[row]
            last = max((place for place, (node, _) in enumerate(keys) if node in answers), default=-1)
            continued = min(usable, sum(self._tokens[node][row] for node, _ in keys[: last + 1]))
            cached = usable - continued + again * (alike - continued)
            cached += operator.items * self._repeated_tokens(number, row, page, alike, seen)
            found[number] = found[number].plus(
                PromptSources(part * operator.items * prompt, part * cached, part * operator.items * continued)
            )
        return found

    def _repeated_tokens(self, number: int, row: int, page: int, alike: int, seen: set[tuple[int, int, int]]) -> float:
        """Mean tokens of a row's item calls that are found, behind the first `alike`, because an item was seen before
        behind the same beginning; the items are noted."""
        known = self._items[number]
        if known is None or not known.items[row]:
            return 0.0
        repeated = 0
        for item in known.items[row]:
            key = known.node, known.before[row], item
            repeated += key in seen
            seen.add(key)
        found = min(known.depths[row] // page * page, self._prompt_tokens[number][row] - 1)
        return float(repeated / len(known.items[row]) * max(0, found - alike))

    def _use(self, cache: _Cache, number: int, row: int, keys: Sequence[tuple[int, int]]) -> None:
        """Note a call's prompt and answer, the end first: what begins most prompts is let go last."""
        operator = self._operators[number]
        alone = number * len(self._prompt_tokens[number]) + row
        answer = self._answers[number]
        if operator.items > 1:
            each = self._prompt_tokens[number][row] - self._by_items[number][row] + operator.output_tokens
            cache.use((_ITEMS, alone), operator.items * each)
        elif answer is None:
            cache.use((_OUTPUT, alone), operator.output_tokens)
        else:
            cache.use((answer, self._classes[answer][row]), operator.output_tokens)
        for key in reversed(keys):
            cache.use(key, self._tokens[key[0]][row])
        cache.shrink()


class _Cache:
    """Pieces by when they were used last, and those that pins keep."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._pieces: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._held = 0
        self._pins: Counter[tuple[int, int]] = Counter()
        """How many pins a piece has, whether or not it is there."""
        self._pinned: dict[tuple[int, int], int] = {}

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._pieces or key in self._pinned

    def use(self, key: tuple[int, int], tokens: int) -> None:
        if key in self._pieces:
            self._pieces.move_to_end(key)
        elif key not in self._pinned:
            pieces = self._pinned if self._pins[key] else self._pieces
            pieces[key] = tokens
            self._held += tokens

    def pin(self, key: tuple[int, int]) -> None:
        self._pins[key] += 1
        if key in self._pieces:
            self._pinned[key] = self._pieces.pop(key)

    def unpin(self, key: tuple[int, int]) -> None:
        self._pins[key] -= 1
        if not self._pins[key] and key in self._pinned:
            self._pieces[key] = self._pinned.pop(key)

    def shrink(self) -> None:
        while self._held > self._capacity and self._pieces:
            self._held -= self._pieces.popitem(last=False)[1]
