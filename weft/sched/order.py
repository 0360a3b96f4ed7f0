"""`AdmissionOrder`: which waiting sequence is admitted next. `FairOrder` is the order of this engine.

`FairOrder` decides in three steps:

1. **Priority.** Sequences of one priority form a *level*. The level that is served next is the one whose oldest
   sequence has the smallest `arrival + priority * aging_s`: a priority is worth so many seconds of having come earlier.
2. **Tenant.** Within a level tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996; with tokens as
   cost, as in Sheng et al., "Fairness in Serving Large Language Models", 2024). Each tenant has a *lane* with a virtual
   start. The lane with the smallest start is served, and its start grows by the tokens that its sequence computes and
   generates. A lane that becomes busy starts no earlier than the lane served last, so that idle time earns nothing.
3. **Arrival.** Within a lane the order is arrival, then sequence number.

Every wait is bounded. A level's oldest sequence keeps its key while later arrivals get larger ones, so only finitely
many sequences of other levels overtake it; within its level every lane that is served moves past the lane of the
sequence after finitely many turns. The order is total: it depends on the calls made to it alone.

Owns the virtual starts and the numbers of admissions. Knows no pages and no device. Called by `WaitingQueue`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

from weft.sched.sequence import Sequence

Rank = tuple[float, float, int]
"""(seconds of arrival, with priority; number of the first admission, or infinity; sequence number)."""


class QueueEntry(NamedTuple):
    """A sequence's place in a heap. It is void once the sequence's ticket is another one."""

    rank: Rank
    ticket: int
    sequence: Sequence

    @property
    def is_valid(self) -> bool:
        """Whether the sequence still waits at this place."""
        return self.sequence.place.ticket == self.ticket


class AdmissionOrder(Protocol):
    """The order in which waiting sequences are admitted, and the rank of all sequences when pages run out."""

    def rank(self, sequence: Sequence) -> Rank:
        """The sequence's place in the order of reclaiming: constant from its first admission on, while its priority is
        the same."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Let a sequence with a fresh ticket wait."""
        ...

    def push_group(self, group: DeferredGroup) -> None:
        """Let all sequences of a group wait; costs the same for any number of them."""
        ...

    def pop(self) -> Sequence | None:
        """Take the next sequence out; its ticket is still valid. None: nothing waits."""
        ...

    def admitted(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence runs now and has `num_tokens` tokens to compute. Fixes its rank at its first admission."""
        ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence has generated tokens."""
        ...

    def clear(self) -> None:
        """Nothing waits: forget what was served to whom."""
        ...


class DeferredGroup:
    """Sequences of one tenant and priority that were set aside together, in order of rank."""

    def __init__(self, priority: int, tenant: str):
        self.priority = priority
        self.tenant = tenant
        self._heap: list[QueueEntry] = []

    def add(self, entry: QueueEntry) -> None:
        """Add a sequence, at the place of its rank."""
        heapq.heappush(self._heap, entry)

    def first(self) -> QueueEntry | None:
        """The first sequence that still waits."""
        while self._heap and not self._heap[0].is_valid:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> None:
        """Take the first sequence out."""
        heapq.heappop(self._heap)


Name = TypeVar("Name", bound=Hashable)


class _Earliest(Generic[Name]):
    """Names by a key that changes. A key that grows is corrected when its name comes first; one that shrinks has to be
    offered again."""

    def __init__(self, key_of: Callable[[Name], tuple[float, ...] | None]):
        self._key_of = key_of
        self._heap: list[tuple[tuple[float, ...], Name]] = []
        self._offered: dict[Name, tuple[float, ...]] = {}
        """The one entry of each name that counts."""

    def offer(self, name: Name) -> None:
        """The name has a key, or a smaller one than before."""
        key = self._key_of(name)
        if key is not None and self._offered.get(name) != key:
            self._offered[name] = key
            heapq.heappush(self._heap, (key, name))

    def first(self) -> Name | None:
        """The name with the smallest key."""
        while self._heap:
            key, name = self._heap[0]
            counts = self._offered.get(name) == key
            if counts and self._key_of(name) == key:
                return name
            heapq.heappop(self._heap)
            if counts:
                del self._offered[name]
                self.offer(name)
        return None


class _Lane:
    """Waiting sequences of one tenant in a level. Groups among them are looked into one sequence at a time."""

    def __init__(self, number: int, start: float):
        self.number = number
        self.start = start
        """Virtual time in tokens: what has been served to the tenant, counted from a common origin."""
        self._heap: list[tuple[Rank, int, QueueEntry | DeferredGroup]] = []
        self._pushes = 0

    def push(self, rank: Rank, item: QueueEntry | DeferredGroup) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (rank, self._pushes, item))

    def first(self) -> Rank | None:
        """The rank of the first sequence."""
        while self._heap:
            rank, _, item = self._heap[0]
            if isinstance(item, QueueEntry):
                if item.is_valid:
                    return rank
                heapq.heappop(self._heap)
                continue
            head = item.first()
            if head is not None and head.rank == rank:
                return rank
            heapq.heappop(self._heap)
            if head is not None:
                self.push(head.rank, item)
        return None

    def pop(self) -> Sequence:
        """Take out the sequence whose rank `first` has just given."""
        _, _, item = self._heap[0]
        if isinstance(item, QueueEntry):
            heapq.heappop(self._heap)
            return item.sequence
        entry = item.first()
        assert entry is not None, "a group without sequences comes first in its lane"
        item.pop()
        return entry.sequence


class _Level:
    """Waiting sequences of one priority: those that have run before, and the lanes of tenants."""

    def __init__(self) -> None:
        self.resumed = _Lane(0, 0.0)
        """Sequences that were admitted and charged before, such as preempted ones: first of their level."""
        self.lanes: dict[str, _Lane] = {}
        self.virtual = 0.0
        """The start of the lane served last."""
        self.by_arrival: _Earliest[str] = _Earliest(lambda tenant: self._first(tenant))
        self.by_start: _Earliest[str] = _Earliest(self._start)
        self._numbers = itertools.count(1)

    def lane(self, tenant: str) -> _Lane:
        """The tenant's lane, which is about to be busy."""
        lane = self.lanes.get(tenant)
        if lane is None:
            self._forget_idle()
            lane = self.lanes[tenant] = _Lane(next(self._numbers), self.virtual)
        elif lane.first() is None:
            lane.start = max(lane.start, self.virtual)
        return lane

    def oldest(self) -> Rank | None:
        """The smallest rank of the level."""
        tenant = self.by_arrival.first()
        ranks = [rank for rank in (self.resumed.first(), None if tenant is None else self._first(tenant)) if rank]
        return min(ranks, default=None)

    def pop(self) -> Sequence | None:
        """Take out the next sequence of the level."""
        if self.resumed.first() is not None:
            return self.resumed.pop()
        tenant = self.by_start.first()
        if tenant is None:
            return None
        lane = self.lanes[tenant]
        self.virtual = max(self.virtual, lane.start)
        return lane.pop()

    def _first(self, tenant: str) -> Rank | None:
        lane = self.lanes.get(tenant)
        return None if lane is None else lane.first()

    def _start(self, tenant: str) -> tuple[float, ...] | None:
        lane = self.lanes.get(tenant)
        return None if lane is None or lane.first() is None else (lane.start, lane.number)

    def _forget_idle(self) -> None:
        """A lane without sequences that lies behind the virtual time would start anew where it stands now. Looked for
        when there are a power of two lanes, which costs each new lane a constant amount on average."""
        count = len(self.lanes)
        if count >= 16 and count & (count - 1) == 0:
            idle = [name for name, lane in self.lanes.items() if lane.start <= self.virtual and lane.first() is None]
            for name in idle:
                del self.lanes[name]


class FairOrder:
    """Priority with aging, then turns of tenants by tokens, then arrival."""

    def __init__(self, aging_s: float):
        self._aging_s = aging_s
        self._levels: dict[int, _Level] = {}
        self._by_level: _Earliest[int] = _Earliest(self._oldest)
        self._admissions = itertools.count(1)

    def rank(self, sequence: Sequence) -> Rank:
        """(arrival + priority * aging_s, admission, number). A sequence that overtook older ones has their arrival."""
        place = sequence.place
        return (place.since_s + sequence.priority * self._aging_s, place.admission, sequence.seq)

    def push(self, sequence: Sequence) -> None:
        """Enter the lane of its tenant and priority; sequences that ran before wait ahead of all lanes of the level."""
        rank = self.rank(sequence)
        entry = QueueEntry(rank, sequence.place.ticket, sequence)
        level = self._level(sequence.priority)
        if sequence.place.was_admitted:
            level.resumed.push(rank, entry)
            self._by_level.offer(sequence.priority)
        else:
            self._push(level, sequence.priority, sequence.tenant, rank, entry)

    def push_group(self, group: DeferredGroup) -> None:
        """Enter the lane of the group's tenant and priority as one entry."""
        first = group.first()
        if first is not None:
            self._push(self._level(group.priority), group.priority, group.tenant, first.rank, group)

    def pop(self) -> Sequence | None:
        """The level of the smallest rank, in it the lane of the smallest start, in it the smallest rank."""
        priority = self._by_level.first()
        return None if priority is None else self._levels[priority].pop()

    def clear(self) -> None:
        """Forget all levels and lanes, and with them what was served."""
        self._levels.clear()

    def admitted(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the tokens to the lane, and take over the arrival of the oldest sequence that was overtaken."""
        place = sequence.place
        if place.was_admitted:
            return
        level = self._levels.get(sequence.priority)
        oldest = None if level is None else level.oldest()
        if oldest is not None:
            place.since_s = min(place.since_s, oldest[0] - sequence.priority * self._aging_s)
        place.admission = next(self._admissions)
        self.charge(sequence, num_tokens)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Move the lane's virtual start on. While no sequence waits at this priority, nothing is counted."""
        level = self._levels.get(sequence.priority)
        lane = None if level is None else level.lanes.get(sequence.tenant)
        if lane is not None:
            lane.start += max(num_tokens, 1)

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        return level

    def _push(self, level: _Level, priority: int, tenant: str, rank: Rank, item: QueueEntry | DeferredGroup) -> None:
        lane = level.lane(tenant)
        lane.push(rank, item)
        level.by_arrival.offer(tenant)
        level.by_start.offer(tenant)
        self._by_level.offer(priority)

    def _oldest(self, priority: int) -> Rank | None:
        level = self._levels.get(priority)
        return None if level is None else level.oldest()
