"""`ReclaimPolicy`: who gives up pages, or a slot, when too little is free. `ByRank` is the policy of this engine.

A policy reads a view and returns one holder; it changes nothing. `Reclaimer` carries the decision out and asks again
while there is too little. Cached prefixes that no sequence uses are not asked for here: allocation evicts them first,
in the order of the cache's `EvictionPolicy`; the view says how many of their pages are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from weft.cache.manager import KVCache
from weft.sched.sequence import Rank, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable

Purpose = Literal["write", "admit", "spaces"]
"""A sequence with a slot writes tokens; a waiting sequence is to be admitted; a program allocates explicit pages."""


class Holder(NamedTuple):
    """Something that can give up pages."""

    kind: Literal["hold", "idle", "waiting", "running", "pins", "space"]
    """A held sequence; a sequence without a slot and without work; one that waits; one with a slot; all pinned prefixes
    together; the youngest space, or all exports."""
    seq: int = 0
    """Number of the sequence; 0 for pins and spaces."""
    num_pages: int = 0
    priority: int = 0
    rank: Rank | None = None


class ReclaimView:
    """Everything that can give pages up, read only. The iterators are lazy: a decision costs what it looks at."""

    def __init__(
        self, purpose: Purpose, missing: int, cache: KVCache, sequences: SequenceTable, needy: Sequence | None
    ):
        self.purpose: Purpose = purpose
        self.missing = missing
        """Pages that are still needed; 0 or less where only a slot is."""
        self.needy = None if needy is None else _holder("running", needy, sequences)
        self._cache = cache
        self._sequences = sequences

    @property
    def num_cached(self) -> int:
        """Pages of cached prefixes that no sequence, hold or pin uses."""
        return self._cache.tiers.num_evictable

    @property
    def num_without_slot(self) -> int:
        """Pages of all sequences without a slot."""
        return sum(len(sequence.table.pages) for sequence in self._sequences.without_slot.values())

    @property
    def has_pins(self) -> bool:
        """Whether a prefix is pinned."""
        return self._cache.retention.has_pins

    def first_hold(self) -> Holder | None:
        """The held sequence whose time ends first."""
        seq = self._cache.retention.first_hold()
        return None if seq is None else Holder("hold", seq)

    def idle(self) -> Iterator[Holder]:
        """Sequences with pages, without a slot and without work, the least recently active first."""
        return self._without_slot("idle", True)

    def waiting(self) -> Iterator[Holder]:
        """Sequences with pages and work that wait for a slot or for another sequence, in no order."""
        return self._without_slot("waiting", False)

    def running(self) -> Iterator[Holder]:
        """Sequences with a slot, in no order."""
        return (_holder("running", sequence, self._sequences) for sequence in self._sequences.running.values())

    def _without_slot(self, kind: Literal["idle", "waiting"], is_idle: bool) -> Iterator[Holder]:
        needy = 0 if self.needy is None else self.needy.seq
        for sequence in self._sequences.without_slot.values():
            if sequence.seq != needy and (sequence.state is SequenceState.IDLE) == is_idle:
                yield _holder(kind, sequence, self._sequences)


class ReclaimPolicy(Protocol):
    """Chooses who gives up pages. Must depend on the view alone."""

    def choose(self, view: ReclaimView) -> Holder | None:
        """The holder that gives up next; None: the one in need has to wait."""
        ...


class ByRank:
    """Sequences without a slot give first: the least recently active idle one, then the waiting one of the last rank.
    Then running sequences of later rank than the one in need (*preemption*). So the first in rank always gets on, and
    all others after it.

    To write, holds are ended before all of these, and pins and spaces after them. To admit, sequences without a slot
    keep their pages where these would not be enough, and only running ones of a less urgent priority are preempted.
    Programs get explicit pages from sequences without a slot alone.
    """

    def choose(self, view: ReclaimView) -> Holder | None:
        """The first holder of the order above that the purpose allows."""
        if view.purpose == "write":
            return view.first_hold() or self._without_slot(view) or self._running(view) or self._last(view)
        if view.missing > 0 and view.num_without_slot >= view.missing:
            found = self._without_slot(view)
            if found is not None:
                return found
        return None if view.purpose == "spaces" else self._running(view)

    def _without_slot(self, view: ReclaimView) -> Holder | None:
        return next(view.idle(), None) or max(view.waiting(), key=_rank, default=None)

    def _running(self, view: ReclaimView) -> Holder | None:
        victim, needy = max(view.running(), key=_rank, default=None), view.needy
        if victim is None or needy is None or victim.seq == needy.seq or _rank(victim) < _rank(needy):
            return None
        if view.purpose == "admit" and victim.priority <= needy.priority:
            return None
        return victim

    def _last(self, view: ReclaimView) -> Holder:
        return Holder("pins") if view.has_pins else Holder("space")


def _holder(kind: Literal["idle", "waiting", "running"], sequence: Sequence, sequences: SequenceTable) -> Holder:
    return Holder(kind, sequence.seq, len(sequence.table.pages), sequence.priority, sequences.rank(sequence))


def _rank(holder: Holder) -> Rank:
    assert holder.rank is not None, "only sequences are compared by rank"
    return holder.rank
