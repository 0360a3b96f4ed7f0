"""Prefixes that are kept from their first call until their last: where the schedule leaves a prefix and comes back to
it, what runs in between may push it out of the cache.

What a pin saves is expected: the tokens of the prefix for each return, times the chance that it is gone by then, which
grows with the KV that the calls in between need and is 1 where that is all that the pins leave. Chosen is what saves
most tokens per page held, within a part of each engine's pages.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from typing import NamedTuple

from weft.config import PINNED_PART
from weft.workflow.analysis.analyse import AnalysedGraph
from weft.workflow.planner.arrange import Arrangement
from weft.workflow.planner.groups import OperatorGroup
from weft.workflow.planner.place import PlanEngine

MAX_PINS = 64
"""Of an engine."""


class PrefixPin(NamedTuple):
    """Tokens with which prompts begin, in whole pages, and when one engine keeps their KV."""

    tokens: tuple[int, ...]
    users: tuple[int, ...]
    """The operators whose prompts begin so, as far as they run on the engine."""
    engine: int
    salt: str | None
    """The `cache_salt` of these calls: those of another one do not find the KV."""
    start: int
    """The part of the schedule from which on it is kept."""
    end: int
    """The part after which it is let go: the last one with a user."""
    nodes: tuple[int, ...]
    """Of the prefix tree; of the last one the tokens may be a part."""


_Key = tuple[int, str | None]
"""A static node of the prefix tree, and the salt of the calls."""


class _Visit(NamedTuple):
    """Calls of one operator, one after the other."""

    operator: int
    tokens: float
    """KV that they need and the call before them has not."""
    times: int = 1
    """How often this visit is repeated just so."""


def prefix_pins(
    analysed: AnalysedGraph,
    arrangement: Arrangement,
    engines: Sequence[PlanEngine],
    pinned_part: float = PINNED_PART,
    *,
    is_continued: bool = False,
) -> list[PrefixPin]:
    """The pins of a schedule, by engine and the part that uses them first. `is_continued`: calls of the same graph run
    before it, so its prefixes are there when it begins."""
    pins: list[PrefixPin] = []
    for number, engine in enumerate(engines):
        num_pages = int(engine.kv_tokens // engine.page_size * pinned_part)
        if num_pages > 0:
            pins += _EnginePins(analysed, arrangement, number, engine, num_pages, is_continued=is_continued).chosen()
    return sorted(pins, key=lambda pin: (pin.start, pin.engine, pin.tokens, pin.salt or ""))


class _EnginePins:
    def __init__(
        self,
        analysed: AnalysedGraph,
        arrangement: Arrangement,
        number: int,
        engine: PlanEngine,
        num_pages: int,
        *,
        is_continued: bool,
    ):
        self._operators = analysed.unrolled.operators
        self._tree = analysed.tree
        self._prompts = analysed.prompts
        self._number = number
        self._page_size = engine.page_size
        self._num_pages = num_pages
        self._room = max(engine.kv_tokens - num_pages * engine.page_size, 1)
        """KV tokens that the pins leave to everything else."""
        self._is_continued = is_continued
        self._depths = self._static_depths()
        self._paths = [self._static_path(operator) for operator in range(len(self._operators))]
        """[operators] the static nodes with which their prompts begin."""
        self._saved: dict[_Key, float] = {}
        """Expected tokens saved by keeping a node's own tokens."""
        self._spans: dict[_Key, tuple[int, int]] = {}
        """The first and the last part that use a node."""
        self._users: dict[_Key, dict[int, None]] = {}
        self._visit_all(arrangement)

    def chosen(self) -> list[PrefixPin]:
        """Greedily, what saves most for each further page."""
        held = [0] * (1 + max((end for _, end in self._spans.values()), default=0))
        """[parts] pages of pins."""
        kept: dict[_Key, None] = {}
        candidates = [key for key in sorted(self._saved, key=str) if self._num_whole_pages(key[0])]
        while candidates and len(kept) < MAX_PINS:
            ranked = []
            for key in candidates:
                saved, pages = self._gain(key, kept)
                start, end = self._spans[key]
                if saved > 0 and max(held[start : end + 1]) + pages <= self._num_pages:
                    ranked.append((saved / max(pages, 1), saved, -key[0], pages, key))
            if not ranked:
                break
            *_, pages, key = max(ranked, key=lambda one: one[:3])
            start, end = self._spans[key]
            for part in range(start, end + 1):
                held[part] += pages
            kept[key] = None
            candidates = [one[-1] for one in ranked if one[-1] != key]
        return list(self._pins(kept))

    def _gain(self, key: _Key, kept: Container[_Key]) -> tuple[float, int]:
        """Tokens that a pin of all up to the end of a node saves beside those that are kept, and its further pages."""
        node, salt = key
        saved, above = 0.0, node
        while (above, salt) not in kept:
            saved += self._saved.get((above, salt), 0.0)
            parent = self._tree.nodes[above].parent
            if parent is None:
                return saved, self._num_whole_pages(node)
            above = parent
        return saved, self._num_whole_pages(node) - self._num_whole_pages(above)

    def _pins(self, kept: Collection[_Key]) -> Iterator[PrefixPin]:
        """A pin for each node that is kept, unless one that goes on behind it is kept for all its calls."""
        for node, salt in kept:
            users = self._users[node, salt].keys()
            longer = (other for other, its in kept if its == salt and other != node and node in self._path_to(other))
            if any(self._users[other, salt].keys() == users for other in longer):
                continue
            nodes = self._path_to(node)
            tokens = [token for step in nodes for token in self._tree.nodes[step].elements]
            start, end = self._spans[node, salt]
            whole = self._num_whole_pages(node) * self._page_size
            yield PrefixPin(tuple(tokens[:whole]), tuple(sorted(users)), self._number, salt, start, end, nodes)

    def _num_whole_pages(self, node: int) -> int:
        """Pages that prompts share which begin with all up to the end of a node, and go on. The last token counts for
        the rest: where a value follows, it may be another one in the prompt."""
        return (self._depths[node] - 1) // self._page_size

    def _path_to(self, node: int) -> tuple[int, ...]:
        path = [node]
        while (above := self._tree.nodes[path[-1]].parent) is not None:
            path.append(above)
        return tuple(reversed(path))

    def _static_depths(self) -> dict[int, int]:
        """By node without a value on the way to it: tokens from the beginning of prompts to its end."""
        depths: dict[int, int] = {}
        for number, node in enumerate(self._tree.nodes):
            if node.placeholder is None and (node.parent is None or node.parent in depths):
                depths[number] = len(node.elements) + (0 if node.parent is None else depths[node.parent])
        return depths

    def _static_path(self, operator: int) -> tuple[_Key, ...]:
        salt = self._operators[operator].salt
        return tuple((node, salt) for node in self._tree.paths[operator] if node in self._depths)

    # ---- the schedule, as visits of prefixes

    def _visit_all(self, arrangement: Arrangement) -> None:
        clock = 0.0
        """KV tokens that the calls so far needed."""
        left: dict[_Key, float] = {}
        """By node: the clock when the last call with it ended."""
        before: tuple[int, int] | None = None
        for number, part in enumerate(arrangement.parts):
            group = part.group
            if group.engine != self._number:
                continue
            for round_of in self._rounds(group, before):
                started = clock
                for visit in round_of:
                    self._visit(visit, number, clock, left)
                    clock += visit.tokens
                    left.update(dict.fromkeys(self._paths[visit.operator], clock))
                # Further rounds are as this one: everything is as long ago as it was.
                more = (round_of[0].times - 1) * (clock - started)
                clock += more
                for key in {key for visit in round_of for key in self._paths[visit.operator]}:
                    left[key] += more
            before = group.operators[-1], group.rows[1] - 1

    def _rounds(self, group: OperatorGroup, before: tuple[int, int] | None) -> list[list[_Visit]]:
        """The visits of a part: operator by operator; row by row, the first row and then each of the others."""
        first, end = group.rows
        if group.order == "nodes" or end - first == 1:
            visits = []
            for operator in group.operators:
                again = self._tokens(operator, first + 1, (operator, first)) if end - first > 1 else 0.0
                visits.append(_Visit(operator, self._tokens(operator, first, before) + (end - first - 1) * again))
                before = operator, end - 1
            return [[visit] for visit in visits]
        rounds = []
        for row, times in ((first, 1), (first + 1, end - first - 1)):
            visits = []
            for operator in group.operators:
                visits.append(_Visit(operator, self._tokens(operator, row, before), times))
                before = operator, row
            rounds.append(visits)
        return rounds

    def _visit(self, visit: _Visit, part: int, clock: float, left: dict[_Key, float]) -> None:
        for key in self._paths[visit.operator]:
            start, _ = self._spans.setdefault(key, (0 if self._is_continued else part, part))
            self._spans[key] = start, part
            self._users.setdefault(key, {})[visit.operator] = None
            since = left.get(key, 0.0 if self._is_continued else None)
            if since is not None:
                chance = min((clock - since) / self._room, 1.0)
                times = visit.times * min(self._operators[visit.operator].calls, 1.0)
                own = len(self._tree.nodes[key[0]].elements)
                self._saved[key] = self._saved.get(key, 0.0) + times * chance * own

    def _tokens(self, operator: int, row: int, before: tuple[int, int] | None) -> float:
        """KV that the calls of an operator in a row need beside that of the call before, (operator, row)."""
        prompts, made = self._prompts, self._operators[operator]
        prompt = int(prompts.prompt_tokens(operator)[row])
        shared = 0
        if before is not None:
            for node in prompts.common(before[0], operator):
                if prompts.classes[node][row] == prompts.classes[node][before[1]]:
                    shared += int(prompts.tokens[node][row])
        own = prompt - int(prompts.shared_by_items(operator, made.shared_by_items)[row]) if made.items > 1 else prompt
        return made.calls * made.output_tokens + max(prompt - shared, 0) + max(made.calls - 1.0, 0.0) * own
