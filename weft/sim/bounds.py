"""What a cache of a given size has to compute again, from the times of turns alone.

The service time of a turn is given here, so what arrives when does not depend on what a cache keeps. Then giving up the
page whose next use is farthest away recomputes the least that any policy can (Belady, 1966): a lower bound, for which
returns are known in advance. Least recently used, in the same model, is what plain prefix caching does.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.sim.scripts import SessionScript, TurnScript


class ServiceTime(NamedTuple):
    """How long a turn takes, independent of the cache: fixed_s + per_token_s x output tokens."""

    fixed_s: float = 0.5
    per_token_s: float = 0.01

    def of(self, turn: TurnScript) -> float:
        """Seconds from when the turn's tokens are there to its last token."""
        return self.fixed_s + self.per_token_s * turn.output_tokens


class TimedTurn(NamedTuple):
    """A turn of a trace."""

    session: int
    kind: str
    begin_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    known_tokens: int
    """Tokens at the begin of the prompt that the session computed before."""
    shared_tokens: int
    """Tokens that are the same in all sessions of the kind."""
    next_s: float
    """When the session's next turn begins; infinity: never."""
    wait_kind: str = ""
    """What it waits for until then, as an engine sees it."""

    @property
    def kept_tokens(self) -> int:
        """Tokens that have KV after the turn: all but the last one generated."""
        return self.prompt_tokens + self.output_tokens - 1


def timed_turns(scripts: Sequence[SessionScript], service: ServiceTime | None = None) -> list[TimedTurn]:
    """All turns, those of subagents included, in order of time."""
    service = service or ServiceTime()
    found: list[TimedTurn] = []
    for script in scripts:
        _time(script, script.arrive_s, service, found)
    return sorted(found, key=lambda turn: (turn.begin_s, turn.session))


def _time(script: SessionScript, begin_s: float, service: ServiceTime, found: list[TimedTurn]) -> float:
    """Add the turns of a session that begins at a time; returns when it ends."""
    length = known = 0
    for index, turn in enumerate(script.turns):
        length += turn.new_tokens
        end_s = begin_s + service.of(turn)
        is_last = index + 1 == len(script.turns)
        returned_s = end_s
        for child in turn.subagents:
            returned_s = _time(child, returned_s, service, found)
        next_s = math.inf if is_last else max(returned_s, end_s + turn.wait_s)
        found.append(
            TimedTurn(
                script.number,
                script.kind,
                begin_s,
                end_s,
                length,
                turn.output_tokens,
                known,
                script.shared_tokens,
                next_s,
                script.last_kind if is_last else turn.wait_kind,
            )
        )
        length += turn.output_tokens
        known = length - 1  # the last token generated has no KV
        begin_s = next_s
    return end_s


# Caches


class IdlePages(NamedTuple):
    """KV pages that no turn uses now: of one session, or of a shared prompt."""

    num_pages: int
    last_s: float
    """When they were used last."""
    next_s: float
    """When they will be used next; infinity: never."""
    order: int
    """Unique; decides between equals."""


FirstToGo = Callable[[IdlePages], tuple[float, ...]]
"""Must not depend on `num_pages`. Ascending: the pages with the least value are given up first, from their end."""


def farthest_next_use(idle: IdlePages) -> tuple[float, ...]:
    """Give up what is used again last: no policy computes fewer tokens again."""
    return (-idle.next_s, idle.order)


def least_recently_used(idle: IdlePages) -> tuple[float, ...]:
    """Give up what was used longest ago, as a plain prefix cache does."""
    return (idle.last_s, idle.order)


class Replayed(NamedTuple):
    """What a cache did over a trace."""

    recomputed_tokens: int
    found_tokens: int
    """Known tokens that were there."""


def replay(turns: Sequence[TimedTurn], num_pages: int, page_size: int, first_to_go: FirstToGo) -> Replayed:
    """Run a trace through a cache of `num_pages` pages.

    A turn holds the pages of its prompt from its begin and those of its output at its end. The shared prompt of a kind
    is kept once. Where running turns alone need more pages than there are, nothing idle is kept and the turns go on: an
    engine would make one of them wait, so the result stays a lower bound.
    """
    return CacheReplay(turns, num_pages, page_size, first_to_go).run()


class CacheReplay:
    """A replay. A subclass may give up pages in an order that changes with time (`first_key`)."""

    def __init__(self, turns: Sequence[TimedTurn], num_pages: int, page_size: int, first_to_go: FirstToGo):
        self.turns = turns
        self.now_s = 0.0
        self._num_pages = num_pages
        self._page_size = page_size
        self._first_to_go = first_to_go
        self.idle: dict[int | str, IdlePages] = {}
        """By session, or kind of a shared prompt."""
        self._order: list[tuple[tuple[float, ...], int, int | str]] = []
        """A heap of (rank, `order`, key); void where `_idle` has another `order`."""
        self._num_idle = 0
        self._used = 0
        self._sharing = Counter[str]()
        """Running turns by kind, of kinds with a shared prompt."""
        self._computed: set[str] = set()
        """Kinds whose shared prompt was computed at some time."""
        self._uses: dict[str, list[float]] = {}
        for turn in turns:
            if turn.shared_tokens:
                self._uses.setdefault(turn.kind, []).append(turn.begin_s)
        self._again = self._found = 0

    def run(self) -> Replayed:
        """Play all turns in order of time; returns the tokens computed again and found."""
        # What ends makes room for what begins at the same time.
        events = [(turn.begin_s, 1, index) for index, turn in enumerate(self.turns)]
        events += [(turn.end_s, 0, index) for index, turn in enumerate(self.turns)]
        for self.now_s, is_begin, index in sorted(events):
            turn = self.turns[index]
            if is_begin:
                self._begin(turn)
            else:
                self._end(turn, index)
        return Replayed(self._again, self._found)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _shared(self, turn: TimedTurn) -> int:
        """Pages of the shared prompt that stand on their own: whole ones."""
        return turn.shared_tokens // self._page_size

    def _begin(self, turn: TimedTurn) -> None:
        shared = self._shared(turn)
        found = kept = 0
        if shared:
            kept = shared if self._sharing[turn.kind] else self._take(turn.kind)
            self._sharing[turn.kind] += 1
            self._used += shared if self._sharing[turn.kind] == 1 else 0
        own = self._take(turn.session)
        found = (kept + own if kept == shared else kept) * self._page_size
        known = turn.known_tokens
        if shared and turn.kind in self._computed:
            known = max(known, turn.shared_tokens)
        self._computed.update([turn.kind] if shared else [])
        found = min(found, known)
        self._found += found
        self._again += known - found
        self._used += self._pages(turn.prompt_tokens) - shared
        self._make_room()

    def _end(self, turn: TimedTurn, index: int) -> None:
        shared = self._shared(turn)
        kept = self._pages(turn.kept_tokens)
        self._used += kept - self._pages(turn.prompt_tokens)
        self._make_room()
        self._used -= kept - shared
        self._put(turn.session, IdlePages(kept - shared, turn.end_s, turn.next_s, 2 * index))
        if shared:
            self._sharing[turn.kind] -= 1
            if not self._sharing[turn.kind]:
                self._used -= shared
                uses = self._uses[turn.kind]
                at = bisect.bisect_left(uses, turn.end_s)
                next_s = uses[at] if at < len(uses) else math.inf
                self._put(turn.kind, IdlePages(shared, turn.end_s, next_s, 2 * index + 1))
        self._make_room()

    def _put(self, key: int | str, idle: IdlePages) -> None:
        if idle.num_pages:
            self.idle[key] = idle
            self._num_idle += idle.num_pages
            heapq.heappush(self._order, (self._first_to_go(idle), idle.order, key))

    def _take(self, key: int | str) -> int:
        idle = self.idle.pop(key, None)
        if idle is None:
            return 0
        self._num_idle -= idle.num_pages
        return idle.num_pages

    def _make_room(self) -> None:
        while self.idle and self._used + self._num_idle > self._num_pages:
            key = self.first_key()
            idle = self.idle[key]
            gone = min(idle.num_pages, self._used + self._num_idle - self._num_pages)
            self._num_idle -= gone
            if gone == idle.num_pages:
                del self.idle[key]
            else:
                self.idle[key] = idle._replace(num_pages=idle.num_pages - gone)

    def first_key(self) -> int | str:
        """Of `idle`, which is not empty, what is given up first now."""
        while True:
            _, order, key = self._order[0]
            idle = self.idle.get(key)
            if idle is not None and idle.order == order:
                return key
            heapq.heappop(self._order)  # used meanwhile


class WorkingSet(NamedTuple):
    """KV of the sessions that run or will return, in tokens."""

    mean: float
    """Over the time from the first turn to the last."""
    peak: int


def working_set(turns: Sequence[TimedTurn]) -> WorkingSet:
    """The KV that a cache would hold to recompute nothing. A shared prompt counts once for each session."""
    changes: list[tuple[float, int]] = []
    for turn in turns:
        until_s = turn.end_s if turn.next_s == math.inf else turn.next_s
        changes += [(turn.begin_s, turn.kept_tokens), (until_s, -turn.kept_tokens)]
    changes.sort()
    total = peak = 0
    area, before_s = 0.0, changes[0][0]
    for time_s, change in changes:
        area += total * (time_s - before_s)
        total, before_s = total + change, time_s
        peak = max(peak, total)
    return WorkingSet(area / (before_s - changes[0][0]), peak)
