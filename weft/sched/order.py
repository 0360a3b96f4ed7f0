"""`AdmissionOrder`: which waiting sequence is admitted next. `FairOrder` is the order of this engine.

`FairOrder` decides in three steps:

1. **Priority.** Sequences of one service (`weft.sched.service_classes`) and priority form a *level*. The level that is
   served next is the one of the smallest service, and of these the one whose oldest sequence has the smallest
   `arrival + priority * aging_s`: a priority is worth so many seconds of having come earlier.
2. **Tenant.** Within a level tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996; with tokens as
   cost, as in Sheng et al., "Fairness in Serving Large Language Models", 2024). Each tenant has a *lane* with a virtual
   start. The lane with the smallest start is served, and its start grows by the tokens that its sequence computes and
   generates. A lane that becomes busy starts no earlier than the lane served last, so that idle time earns nothing.
3. **Arrival.** Within a lane the order is arrival, then sequence number.

Every wait within a service is bounded. A level's oldest sequence keeps its key while later arrivals get larger ones, so
only finitely many sequences of other levels overtake it; within its level every lane that is served moves past the lane
of the sequence after finitely many turns. `ServiceClasses` bounds waits for earlier services. The order is total: it
depends on the calls made to it alone.

Owns the virtual starts and the numbers of admissions. Knows no pages and no device. Called by `WaitingQueue`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import Protocol

from weft.sched.sequence import Rank, Sequence

WaitingEntry = tuple[float, float, int, int, Sequence]
"""(the three numbers of the rank, ticket, sequence). It is void once the sequence's ticket is another one, or 0. Flat,
because heaps compare such entries more often than anything else happens to them."""


class AdmissionOrder(Protocol):
    """The order in which waiting sequences are admitted, and the rank of all sequences when pages run out."""

    def rank(self, sequence: Sequence) -> Rank:
        """The sequence's place in the order of reclaiming: constant from its first admission on, while its priority is
        the same."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Let a sequence with a fresh ticket and rank wait."""
        ...

    def push_group(self, group: DeferredGroup) -> None:
        """Let all sequences of a group wait; costs the same for any number of them."""
        ...

    def next(self, but: Collection[str] = ()) -> Sequence | None:
        """The sequence to admit next, of tenants that are not in `but`; None: nothing of them waits. It waits until its
        ticket changes."""
        ...

    def admitted(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence runs now and has `num_tokens` tokens to compute. Fixes its rank at its first admission."""
        ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence has generated tokens."""
        ...

    def first_of(self, service: int) -> Sequence | None:
        """The first in rank that waits of those of a service; None: none does, though some may be deferred."""
        ...

    def clear(self) -> None:
        """Nothing waits: forget what was served to whom."""
        ...


class DeferredGroup:
    """Sequences of one tenant and level that were set aside together, in order of rank."""

    def __init__(self, level: tuple[int, int], tenant: str):
        self.level = level
        self.tenant = tenant
        self._heap: list[WaitingEntry] = []

    def add(self, entry: WaitingEntry) -> None:
        """Add a sequence, at the place of its rank."""
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


def _sweep(heap: _Heap) -> None:
    """Drop all void entries."""
    heap[:] = [
        entry
        for entry in heap
        if (entry[4].place.ticket == entry[3] if isinstance(entry[4], Sequence) else entry[4].first())
    ]
    heapq.heapify(heap)


class _Lane:
    """Waiting sequences of one tenant in a level."""

    __slots__ = ("has_turn", "heap", "number", "start", "tenant")

    def __init__(self, tenant: str, number: int, start: float):
        self.tenant = tenant
        self.number = number
        self.start = start
        """Virtual time in tokens: what has been served to the tenant, counted from a common origin."""
        self.heap: _Heap = []
        self.has_turn = False
        """Whether the level's `turns` have an entry of it."""


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

    def join_lane(self, tenant: str, item: _Item) -> None:
        """Enter the lane of a tenant."""
        lane = self.lanes.get(tenant)
        if lane is None:
            self._num_lanes += 1
            lane = self.lanes[tenant] = _Lane(tenant, self._num_lanes, self.virtual)
        elif lane.start < self.virtual and _first(lane.heap) is None:
            lane.start = self.virtual
        heapq.heappush(lane.heap, item)
        if not lane.has_turn:
            lane.has_turn = True
            heapq.heappush(self._turns, (lane.start, lane.number, lane))

    def next(self, but: Collection[str]) -> Sequence | None:
        """The next sequence of the level, of tenants that are not in `but`. Their lanes earn nothing meanwhile."""
        entry = _first_but(self.resumed, but) if self.resumed else None
        held: list[_Lane] = []
        while entry is None and self._turns:
            start, number, lane = self._turns[0]
            if start != lane.start:
                heapq.heapreplace(self._turns, (lane.start, number, lane))
                continue
            if lane.tenant in but:
                held.append(heapq.heappop(self._turns)[2])
                continue
            entry = _first(lane.heap)
            if entry is None:
                heapq.heappop(self._turns)
                lane.has_turn = False
            else:
                self.virtual = max(self.virtual, start)
        for lane in held:
            lane.start = max(lane.start, self.virtual)
            heapq.heappush(self._turns, (lane.start, lane.number, lane))
        return None if entry is None else entry[4]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Move the virtual start of a tenant's lane on, if it has one."""
        lane = self.lanes.get(tenant)
        if lane is not None:
            lane.start += max(num_tokens, 1)

    def sweep(self) -> None:
        """Drop void entries. Of too many lanes, drop those that would start anew where they stand now."""
        for heap in (self.heap, self.resumed, *(lane.heap for lane in self.lanes.values())):
            _sweep(heap)
        self._turns = [(lane.start, lane.number, lane) for lane in self.lanes.values() if lane.heap]
        heapq.heapify(self._turns)
        for lane in self.lanes.values():
            lane.has_turn = bool(lane.heap)
        if len(self.lanes) > MAX_IDLE_LANES:
            self.lanes = {name: lane for name, lane in self.lanes.items() if lane.heap or lane.start > self.virtual}


class FairOrder:
    """Priority with aging, then turns of tenants by tokens, then arrival."""

    def __init__(self, aging_s: float):
        self._aging_s = aging_s
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
        """(arrival + priority * aging_s, later services behind; admission; number). A sequence that overtook older ones
        has their arrival."""
        place = sequence.place
        return (place.since_s + self._behind_s(sequence), place.admission, sequence.seq)

    def push(self, sequence: Sequence) -> None:
        """Enter the lane of its tenant and priority; sequences that ran before wait ahead of all lanes of the level."""
        place = sequence.place
        item = (*place.rank, place.ticket, sequence)
        level = self._enter(sequence.level, item)
        if place.was_admitted:
            heapq.heappush(level.resumed, item)
        else:
            level.join_lane(sequence.tenant, item)

    def push_group(self, group: DeferredGroup) -> None:
        """Enter the lane of the group's tenant and priority as one entry."""
        first = group.first()
        if first is not None:
            item = (*first[:4], group)
            self._enter(group.level, item).join_lane(group.tenant, item)

    def next(self, but: Collection[str] = ()) -> Sequence | None:
        """The level of the smallest rank, in it the lane of the smallest start, in it the smallest rank."""
        if len(self._levels) == 1:
            [level] = self._levels.values()
            return level.next(but)
        if but:
            firsts = sorted(entry for level in self._levels.values() if (entry := _first(level.heap)) is not None)
            levels = (self._levels[entry[4].level].next(but) for entry in firsts)
            return next((sequence for sequence in levels if sequence is not None), None)
        oldest = _first(self._heap)
        return None if oldest is None else self._levels[oldest[4].level].next(but)

    def first_of(self, service: int) -> Sequence | None:
        """The first in rank of the sequences of a service that wait and are not deferred."""
        firsts = [_first(level.heap) for (found, _), level in self._levels.items() if found == service]
        oldest = min((first for first in firsts if first is not None), default=None)
        return None if oldest is None else oldest[4]

    def clear(self) -> None:
        """Forget all levels and lanes, and with them what was served."""
        self._levels.clear()
        self._heap.clear()

    def admitted(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the tokens to the lane, and take over the arrival of the oldest sequence that was overtaken."""
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
            oldest = _first(level.heap)
            if oldest is not None:
                place.since_s = min(place.since_s, oldest[0] - aged_s)
        level.charge(sequence.tenant, num_tokens)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Move the lane's virtual start on. While no sequence waits at this priority, nothing is counted."""
        level = self._levels.get(sequence.level)
        if level is not None:
            level.charge(sequence.tenant, num_tokens)

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
        self._levels = {name: level for name, level in self._levels.items() if level.heap or level.lanes}
        self._until_sweep = max(MIN_SWEEP, len(self._heap) + sum(len(level.lanes) for level in self._levels.values()))
