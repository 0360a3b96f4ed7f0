"""`FairOrder`: which waiting sequence is admitted next. It decides in three steps:

1. **Priority.** Sequences of one service (`weft.sched.service_classes`) and priority form a *level*. The level that is
   served next is the one of the smallest service, and of these the one whose oldest sequence has the smallest
   `arrival + priority * aging_s`: a priority is worth so many seconds of having come earlier.
2. **Tenant.** Within a level tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996; with tokens as
   cost, as in Sheng et al., "Fairness in Serving Large Language Models", 2024). Each tenant has a *lane* with a virtual
   start. The lane with the smallest start is served, and its start grows by the tokens that its sequence computes and
   generates. A lane that becomes busy starts no earlier than the lane served last, so that idle time earns nothing.
3. **Session.** A sequence that was intercepted is *warm* if most of its KV is there, else *cold*; one that was not is a
   *newcomer*. Within a lane warm sequences come first, then cold ones, both by the arrival of the first work of their
   session (APIServe, section 4.3), then newcomers by arrival. One that has waited for long may *pass*: of the warm, of
   the cold, or of the newcomers, the one that has waited longest goes before those that came, or came back, more than
   `aging_s` after it became the first. Once one has passed, returns get `max_context` new tokens before another one
   does. While the next one waits for spared KV (`weft.sched.reclaim`), warm ones of its lane go on.

Sessions that have begun are finished first because open sessions hold memory, and of these the warm ones, because a
cold one takes the KV of others. In overload, each session lost its KV before its next turn when newcomers went before
all returns as soon as they had waited for `aging_s`, and when cold returns went before warm ones. A session that ends
has at most `max_context` new tokens, so no more sessions begin by passing than end.

Every wait within a service is bounded. A level's oldest sequence keeps its key while later arrivals get larger ones, so
only finitely many sequences of other levels overtake it; within its level every lane that is served moves past the lane
of the sequence after finitely many turns. Within a lane the longest waiting warm sequences, cold ones and newcomers
pass in turn, so the n-th newcomer waits for no more than n times `aging_s` and the time in which returns get 3
`max_context` new tokens, however long sessions last. `ServiceClasses` bounds waits for earlier services. The order is
total: it depends on the calls made to it alone.

Owns the virtual starts and the numbers of admissions. Knows no pages and no device. Called by `WaitingQueue`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection
from typing import TypeVar

from weft.sched.sequence import COMING_BACK, NEW, WARM, QueuePlace, Rank, Sequence

WaitingEntry = tuple[float, float, int, int, Sequence]
"""(the three numbers of the rank, ticket, sequence). It is void once the sequence's ticket is another one, or 0. Flat,
because heaps compare such entries more often than anything else happens to them."""


class DeferredGroup:
    """Sequences of one tenant, level and line that were set aside together, in order of rank."""

    def __init__(self, level: tuple[int, int], tenant: str, line: int):
        self.level = level
        self.tenant = tenant
        self.line = line
        self.first_s = math.inf
        """When the first work of the oldest one arrived."""
        self._heap: list[WaitingEntry] = []

    def add(self, entry: WaitingEntry) -> None:
        """Add a sequence, at the place of its rank."""
        self.first_s = min(self.first_s, entry[4].place.first_s)
        heapq.heappush(self._heap, entry)

    def first(self) -> WaitingEntry | None:
        """The first sequence that still waits."""
        heap = self._heap
        while heap and heap[0][4].place.ticket != heap[0][3]:
            heapq.heappop(heap)
        return heap[0] if heap else None


SERVICE_S = 1e9
"""By how many seconds a service ranks behind the one before it: more than any wait and any priority make up for."""
MIN_SWEEP = 64
"""Entries that come between two sweeps at least."""
MAX_IDLE_LANES = 1024
"""Lanes of a level from which on a sweep forgets those where nothing waits: of each, the last charges may be lost."""

_Item = tuple[float, float, int, int, Sequence | DeferredGroup]
"""An entry of a sequence, or of a group at the place of its first one."""
_Heap = list[_Item]
_Aged = tuple[float, int, int, Sequence | DeferredGroup]
"""(when its first work arrived, sequence number, ticket, sequence or group)."""
_AnyEntry = TypeVar("_AnyEntry", _Item, _Aged)


def _first(heap: _Heap) -> WaitingEntry | None:
    """The first sequence that still waits. Drops void entries before it, and moves groups whose first one has left."""
    while heap:
        since_s, admission, seq, ticket, item = heap[0]
        if isinstance(item, Sequence):
            if item.place.ticket == ticket:
                return since_s, admission, seq, ticket, item
            heapq.heappop(heap)
            continue
        head = item.first()
        if head is None:
            heapq.heappop(heap)
        elif head[3] == ticket:
            return head
        else:
            heapq.heapreplace(heap, (*head[:4], item))
    return None


def _overtake(heap: _Heap, place: QueuePlace, aged_s: float) -> None:
    """Give a place the arrival of the oldest sequence that still waits, if that is earlier."""
    oldest = _first(heap)
    if oldest is not None:
        place.since_s = min(place.since_s, oldest[0] - aged_s)


def _first_but(heap: _Heap, but: Collection[str]) -> WaitingEntry | None:
    """The first sequence that still waits, of tenants that are not in `but`. The heap has no groups."""
    entry = _first(heap)
    held: _Heap = []
    while entry is not None and entry[4].tenant in but:
        held.append(heapq.heappop(heap))
        entry = _first(heap)
    for item in held:
        heapq.heappush(heap, item)
    return entry


def _sweep(heap: list[_AnyEntry]) -> None:
    """Drop all void entries."""
    heap[:] = [
        entry
        for entry in heap
        if (item.place.ticket == entry[-2] if isinstance(item := entry[-1], Sequence) else item.first() is not None)
    ]
    heapq.heapify(heap)


def _oldest(heap: list[_Aged]) -> WaitingEntry | None:
    """The waiting sequence whose session began first. Drops void entries before it."""
    while heap:
        _, _, ticket, item = heap[0]
        if isinstance(item, Sequence):
            if item.place.ticket == ticket:
                return (*item.place.rank, ticket, item)
        elif (head := item.first()) is not None:
            return head
        heapq.heappop(heap)
    return None


class _Line:
    """The warm sequences of a lane, the cold ones, or the newcomers."""

    __slots__ = ("by_age", "heap", "key")

    def __init__(self) -> None:
        self.heap: _Heap = []
        """All of them, by rank: for how long they have waited."""
        self.by_age: list[_Aged] = []
        """The same, by the arrival of the first work of their sessions. Empty for newcomers, whose rank says it."""
        self.key = -math.inf
        """As in ranks, when the one that waited longest was last admitted: since then the next one is the first."""

    def sweep(self) -> None:
        """Drop void entries."""
        _sweep(self.heap)
        _sweep(self.by_age)


class _Lane:
    """Waiting sequences of one tenant in a level."""

    __slots__ = ("_num_owed", "has_turn", "lines", "number", "start", "tenant")

    def __init__(self, tenant: str, number: int, start: float):
        self.tenant = tenant
        self.number = number
        self.start = start
        """Virtual time in tokens: what has been served to the tenant, counted from a common origin."""
        self.has_turn = False
        """Whether the level's `turns` have an entry of it."""
        self.lines = (_Line(), _Line(), _Line())
        """By `QueuePlace.line`."""
        self._num_owed = 0
        """New tokens that returns get before one goes ahead of an older one again because it has waited for long."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no entries, void ones included."""
        warm, cold, new = self.lines
        return not (warm.heap or cold.heap or new.heap)

    def first_warm(self) -> WaitingEntry | None:
        """Who is next of the warm ones, though others that have waited for long would pass."""
        warm = self.lines[WARM]
        return _oldest(warm.by_age) if _first(warm.heap) is not None else None

    def first(self) -> WaitingEntry | None:
        """Who is next: see the module."""
        usual = passing = None
        passing_key = math.inf
        for line in self.lines:
            longest = _first(line.heap) if line.heap else None
            if longest is None:
                continue
            if usual is None:
                by_age = line.by_age
                usual = longest if not by_age or by_age[0][3] is longest[4] else _oldest(by_age)
            key = max(longest[0], line.key)
            if key <= passing_key:
                passing, passing_key = longest, key
        if usual is None or self._num_owed > 0 or usual[0] < passing_key:
            return usual
        return passing

    def admitted(self, sequence: Sequence, num_tokens: int, max_context: int, key: float) -> None:
        """The sequence that was next has been admitted at a time, as in ranks, and has `num_tokens` to compute."""
        self.start += max(num_tokens, 1)
        place = sequence.place
        line = self.lines[place.line]
        if place.line != NEW:
            self._num_owed -= max(sequence.total - place.num_known, 1)
        if line.heap and line.heap[0][:3] == place.rank:  # it is void now, and still in its place
            line.key = key
        has_passed = False
        for before in self.lines[: place.line]:
            has_passed |= bool(before.heap) and _first(before.heap) is not None
        if not has_passed and line.by_age and line.by_age[0][3] is not sequence:
            oldest = _oldest(line.by_age)
            has_passed = oldest is not None and oldest[4].place.first_s < place.first_s
        if has_passed:
            self._num_owed = max_context

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence of the lane has generated tokens."""
        self.start += max(num_tokens, 1)
        if sequence.place.line != NEW:
            self._num_owed -= num_tokens

    def sweep(self) -> None:
        """Drop void entries."""
        for line in self.lines:
            line.sweep()


class _Level:
    """Waiting sequences of one priority: those that have run before, and the lanes of tenants."""

    __slots__ = ("_num_lanes", "_turns", "heap", "lanes", "resumed", "virtual")

    def __init__(self) -> None:
        self.heap: _Heap = []
        """All of them."""
        self.resumed: _Heap = []
        """Those that were admitted and charged before, such as preempted ones: first of their level."""
        self.lanes: dict[str, _Lane] = {}
        self.virtual = 0.0
        """The start of the lane served last."""
        self._turns: list[tuple[float, int, _Lane]] = []
        """A heap of (start, number, lane), one for each busy lane. Starts only grow, so one that has grown since is
        corrected when its lane comes first."""
        self._num_lanes = 0
        """Lanes made so far. Their numbers decide between equal starts."""

    def join_lane(self, tenant: str, item: _Item, line: int, first_s: float) -> None:
        """Enter a line of a tenant's lane. `first_s`: when the session began, that of a group's oldest one."""
        lane = self.lanes.get(tenant)
        if lane is None:
            self._num_lanes += 1
            lane = self.lanes[tenant] = _Lane(tenant, self._num_lanes, self.virtual)
        elif lane.start < self.virtual and lane.first() is None:
            lane.start = self.virtual
        heapq.heappush(lane.lines[line].heap, item)
        if line != NEW:
            heapq.heappush(lane.lines[line].by_age, (first_s, *item[2:]))
        if not lane.has_turn:
            lane.has_turn = True
            heapq.heappush(self._turns, (lane.start, lane.number, lane))

    def next(self, but: Collection[str], but_warm: Collection[str]) -> Sequence | None:
        """The next sequence of the level, of tenants that are not in `but`, and of those in `but_warm` a warm one.
        Lanes that have none earn nothing meanwhile."""
        # One lane is busy: the usual case, without the heap.
        if len(self._turns) == 1 and not (but or but_warm or self.resumed):
            lane = self._turns[0][2]
            warm, cold, new = lane.lines
            entry = lane.first() if warm.heap or cold.heap else _first(new.heap)
            if entry is not None:
                if lane.start > self.virtual:
                    self.virtual = lane.start
                return entry[4]
        entry = _first_but(self.resumed, but) if self.resumed else None
        held: list[_Lane] = []
        while entry is None and self._turns:
            start, number, lane = self._turns[0]
            if start != lane.start:
                heapq.heapreplace(self._turns, (lane.start, number, lane))
                continue
            is_held = lane.tenant in but
            if not is_held:
                entry = lane.first_warm() if lane.tenant in but_warm else lane.first()
                is_held = entry is None and lane.tenant in but_warm
            if is_held:
                held.append(heapq.heappop(self._turns)[2])
                continue
            if entry is None:
                heapq.heappop(self._turns)
                lane.has_turn = False
            else:
                self.virtual = max(self.virtual, start)
        for lane in held:
            lane.start = max(lane.start, self.virtual)
            heapq.heappush(self._turns, (lane.start, lane.number, lane))
        return None if entry is None else entry[4]

    def sweep(self) -> None:
        """Drop void entries. Of too many lanes, drop those that would start anew where they stand now."""
        _sweep(self.heap)
        _sweep(self.resumed)
        for lane in self.lanes.values():
            lane.sweep()
        self._turns = [(lane.start, lane.number, lane) for lane in self.lanes.values() if not lane.is_empty]
        heapq.heapify(self._turns)
        for lane in self.lanes.values():
            lane.has_turn = not lane.is_empty
        if len(self.lanes) > MAX_IDLE_LANES:
            self.lanes = {
                name: lane for name, lane in self.lanes.items() if not lane.is_empty or lane.start > self.virtual
            }


class FairOrder:
    """The order in which waiting sequences are admitted, and the rank of all sequences when pages run out: by priority
    with aging, then turns of tenants by tokens, then arrival."""

    def __init__(self, aging_s: float, max_context: int):
        """`max_context`: tokens that a sequence may have."""
        self._aging_s = aging_s
        self._max_context = max_context
        self._levels: dict[tuple[int, int], _Level] = {}
        """By service and priority."""
        self._heap: _Heap = []
        """Everything that waits. An entry is in three heaps: this one, its level's, and that of its lane or `resumed`.
        It is dropped from each when it is void and comes first, or by a sweep."""
        self._until_sweep = MIN_SWEEP
        """Entries that may come before the next sweep: as many as the last one left at least, so that a sweep costs
        each a constant time."""
        self._admissions = itertools.count(1)

    def rank(self, sequence: Sequence) -> Rank:
        """The sequence's place in the order of reclaiming: constant from its first admission on, while its priority is
        the same.

        (arrival + priority * aging_s, later services behind; admission; number). A sequence that overtook older ones
        has their arrival.
        """
        place = sequence.place
        return (place.since_s + self._behind_s(sequence), place.admission, sequence.seq)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence with a fresh ticket and rank wait: in the lane of its tenant and priority, or ahead of all
        lanes of the level if it ran before."""
        place = sequence.place
        item = (*place.rank, place.ticket, sequence)
        level = self._enter(sequence.level, item)
        if place.was_admitted:
            heapq.heappush(level.resumed, item)
        else:
            level.join_lane(sequence.tenant, item, place.line, place.first_s)

    def push_group(self, group: DeferredGroup) -> None:
        """Let all sequences of a group wait, as one entry in the lane of its tenant and priority; costs the same for
        any number of them."""
        first = group.first()
        if first is not None:
            item = (*first[:4], group)
            self._enter(group.level, item).join_lane(group.tenant, item, group.line, group.first_s)

    def next(self, but: Collection[str] = (), but_warm: Collection[str] = ()) -> Sequence | None:
        """The sequence to admit next, of tenants that are not in `but`, and of those in `but_warm` a warm one or one
        that has run before; None: none of these waits. It waits until its ticket changes.

        Of the level of the smallest rank, in it the lane of the smallest start, in it the smallest rank.
        """
        if len(self._levels) == 1:
            [level] = self._levels.values()
            return level.next(but, but_warm)
        if but or but_warm:
            firsts = sorted(entry for level in self._levels.values() if (entry := _first(level.heap)) is not None)
            levels = (self._levels[entry[4].level].next(but, but_warm) for entry in firsts)
            return next((sequence for sequence in levels if sequence is not None), None)
        oldest = _first(self._heap)
        return None if oldest is None else self._levels[oldest[4].level].next(but, but_warm)

    def first_of(self, service: int) -> Sequence | None:
        """The first in rank that waits of those of a service; None: none does, though some may be deferred."""
        firsts = [_first(level.heap) for (found, _), level in self._levels.items() if found == service]
        oldest = min((first for first in firsts if first is not None), default=None)
        return None if oldest is None else oldest[4]

    def clear(self) -> None:
        """Nothing waits: forget all levels and lanes, and with them what was served to whom."""
        self._levels.clear()
        self._heap.clear()

    def begun(self, sequence: Sequence) -> None:
        """Pages of the sequence that was next begin to come back from the host. It waits on, for the rest of them, with
        the arrival of the oldest sequence that it goes before, which takes no pages from it then."""
        place, level = sequence.place, self._levels.get(sequence.level)
        if place.was_admitted:
            return
        place.admission = COMING_BACK
        if level is not None and level.heap:
            _overtake(level.heap, place, self._behind_s(sequence))

    def admitted(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A sequence runs now and has `num_tokens` tokens to compute. The first admission fixes its rank.

        Charges the tokens to the lane, and takes over the arrival of the oldest sequence that was overtaken.
        """
        place = sequence.place
        if place.was_admitted:
            return
        place.admission = next(self._admissions)
        level = self._levels.get(sequence.level)
        if level is None:
            return
        aged_s = self._behind_s(sequence)
        # A void entry that comes first is no later than the oldest one: in most cases there is no need to drop it.
        if level.heap and level.heap[0][0] < place.since_s + aged_s:
            _overtake(level.heap, place, aged_s)
        lane = level.lanes.get(sequence.tenant)
        if lane is not None:
            lane.admitted(sequence, num_tokens, self._max_context, now + aged_s)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence has generated tokens: move its lane's virtual start on. While no sequence waits at this priority,
        nothing is counted."""
        level = self._levels.get(sequence.level)
        lane = None if level is None else level.lanes.get(sequence.tenant)
        if lane is not None:
            lane.charge(sequence, num_tokens)

    def _behind_s(self, sequence: Sequence) -> float:
        """By how many seconds a sequence ranks behind its arrival."""
        return sequence.priority * self._aging_s + sequence.service * SERVICE_S

    def _enter(self, name: tuple[int, int], item: _Item) -> _Level:
        """Put an entry among all and into its level, which is returned."""
        self._until_sweep -= 1
        if self._until_sweep < 0:
            self._sweep()
        level = self._levels.get(name)
        if level is None:
            level = self._levels[name] = _Level()
        heapq.heappush(self._heap, item)
        heapq.heappush(level.heap, item)
        return level

    def _sweep(self) -> None:
        _sweep(self._heap)
        for level in self._levels.values():
            level.sweep()
        self._levels = {name: level for name, level in self._levels.items() if level.heap}
        self._until_sweep = max(MIN_SWEEP, len(self._heap) + sum(len(level.lanes) for level in self._levels.values()))
