"""`WaitingQueue`: sequences that have work and no slot.

Owns which of them wait and which are deferred, and how many there are. The order of those that wait is that of
`FairOrder`. A sequence is *deferred* while another one is computing the prefix that it needs. It comes back when the
other has computed the pages they share, when the other gives up, or after a bounded number of steps. However many
sequences come back at once, they come back as groups, and a group is looked into one sequence at a time: the work of a
step depends on what it admits, not on how many wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection

from weft.sched.order import DeferredGroup, FairOrder
from weft.sched.sequence import AppendOp, Rank, Sequence, SequenceState


class _Awaited:
    """The groups that wait for one in-flight prefix, by the pages it must have first."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[tuple[tuple[int, int], str, int], DeferredGroup]] = {}
        self._pages: list[int] = []
        """The keys of `_groups` as a heap."""

    def group(self, num_pages: int, sequence: Sequence) -> DeferredGroup:
        """The group of a sequence that waits until `num_pages` pages are indexed."""
        groups = self._groups.get(num_pages)
        if groups is None:
            groups = self._groups[num_pages] = {}
            heapq.heappush(self._pages, num_pages)
        key = sequence.level, sequence.tenant, sequence.place.line
        group = groups.get(key)
        if group is None:
            group = groups[key] = DeferredGroup(*key)
        return group

    def take(self, num_pages: int | None) -> list[DeferredGroup]:
        """Take out the groups that wait for at most `num_pages` pages; None: all."""
        taken: list[DeferredGroup] = []
        while self._pages and (num_pages is None or self._pages[0] <= num_pages):
            taken.extend(self._groups.pop(heapq.heappop(self._pages)).values())
        return taken

    def __bool__(self) -> bool:
        return bool(self._pages)


class WaitingQueue:
    """Waiting and deferred sequences over a `FairOrder`."""

    def __init__(self, order: FairOrder):
        self.order = order
        self._tickets = itertools.count(1)
        self._size = 0
        self._num_other = 0
        self._by_service: Counter[int] = Counter()
        self._by_tenant: dict[str, int] = {}
        """Without tenants of which nothing waits. Changed without a call, in every admission."""
        self._awaited: dict[int, _Awaited] = {}
        """By the sequence that computes the prefix."""
        self._deadlines: list[tuple[int, int, Sequence]] = []
        """A heap of (step, ticket, sequence)."""

    def __len__(self) -> int:
        """Sequences that wait, deferred ones included."""
        return self._size

    @property
    def is_turn_based(self) -> bool:
        """Whether every sequence here waits for an append that reports about its tokens."""
        return self._num_other == 0

    def num_of(self, service: int) -> int:
        """Sequences of a service that wait, deferred ones included."""
        return self._by_service[service]

    def has_share(self, sequence: Sequence, max_waiting: int) -> bool:
        """Whether fewer other sequences of the tenant of `sequence` wait than its share of a queue of `max_waiting`,
        which the tenants that wait, this one included, share equally."""
        tenants, own = self._by_tenant, self._by_tenant.get(sequence.tenant, 0)
        num_tenants = len(tenants) + (sequence.tenant not in tenants)
        return (own - bool(sequence.place.ticket)) * num_tenants < max_waiting

    def push(self, sequence: Sequence) -> None:
        """Enter the queue, or take the place that a changed priority gives. A sequence that is deferred waits again."""
        place, rank = sequence.place, self.order.rank(sequence)
        if place.ticket and sequence.state is SequenceState.WAITING and place.rank == rank:
            self._count_kind(sequence)
            return
        if place.ticket:
            self.remove(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._enter(sequence, rank)
        self.order.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Leave the queue, from wherever in it. Idempotent."""
        place = sequence.place
        if place.ticket:
            place.ticket = 0
            self._size -= 1
            self._num_other -= not place.is_turn_based
            self._by_service[place.service] -= 1
            left = self._by_tenant[sequence.tenant] - 1
            if left:
                self._by_tenant[sequence.tenant] = left
            else:
                del self._by_tenant[sequence.tenant]

    def pop(self, but: Collection[str] = (), but_warm: Collection[str] = ()) -> Sequence | None:
        """Take the next sequence out, of tenants that are not in `but`, and of those in `but_warm` a warm one or one
        that has run before. None: none of these waits, though some may be deferred."""
        if not self._size:
            self.order.clear()
            return None
        sequence = self.order.next(but, but_warm)
        if sequence is not None:
            self.remove(sequence)
            if sequence.state is SequenceState.DEFERRED:
                sequence.move_to(SequenceState.WAITING)
        return sequence

    # Deferring

    def defer(self, sequence: Sequence, leader: int, num_pages: int, until_step: int) -> None:
        """Set a sequence that was taken out aside until sequence `leader` has `num_pages` pages in the prefix index, at
        most until a step."""
        sequence.move_to(SequenceState.DEFERRED)
        rank = self.order.rank(sequence)
        self._enter(sequence, rank)
        awaited = self._awaited.setdefault(leader, _Awaited())
        ticket = sequence.place.ticket
        awaited.group(num_pages, sequence).add((*rank, ticket, sequence))
        heapq.heappush(self._deadlines, (until_step, ticket, sequence))

    def progressed(self, leader: int, num_pages: int) -> None:
        """`leader` has `num_pages` pages in the prefix index."""
        awaited = self._awaited.get(leader)
        if awaited is not None:
            self._return(awaited.take(num_pages))
            if not awaited:
                del self._awaited[leader]

    def gave_up(self, leader: int) -> None:
        """`leader` computes no prefix any more."""
        awaited = self._awaited.pop(leader, None)
        if awaited is not None:
            self._return(awaited.take(None))

    def end_deferrals(self, step: int) -> None:
        """Sequences that were deferred until `step` wait again."""
        while self._deadlines and self._deadlines[0][0] <= step:
            _, ticket, sequence = heapq.heappop(self._deadlines)
            if sequence.place.ticket == ticket and sequence.state is SequenceState.DEFERRED:
                self.push(sequence)

    def _return(self, groups: list[DeferredGroup]) -> None:
        for group in groups:
            self.order.push_group(group)

    def _enter(self, sequence: Sequence, rank: Rank) -> None:
        place = sequence.place
        place.ticket = next(self._tickets)
        place.rank = rank
        place.is_turn_based = True
        place.service = sequence.service
        self._size += 1
        self._by_service[place.service] += 1
        tenant = sequence.tenant
        self._by_tenant[tenant] = self._by_tenant[tenant] + 1 if tenant in self._by_tenant else 1
        self._count_kind(sequence)

    def _count_kind(self, sequence: Sequence) -> None:
        """Count a sequence by what it waits with now."""
        place, is_turn_based = sequence.place, isinstance(sequence.head, AppendOp)
        self._num_other += place.is_turn_based - is_turn_based
        place.is_turn_based = is_turn_based
