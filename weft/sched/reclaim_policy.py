"""`ByRank`: whose KV may be taken when too little is free.

It reads a view and returns holders; it changes nothing. `Reclaimer` carries the decision out and asks again
while there is too little. Idle sequences and cached prefixes are not asked for here: their pages are in the prefix
index and count as available, and which of them go is the matter of the index's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from weft.cache.manager import KVCache
from weft.sched.sequence import Rank, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable

Purpose = Literal["write", "admit", "start", "spaces", "own", "excess"]
"""A sequence with a slot writes tokens; a waiting sequence is to be admitted; the first in the queue is to be admitted
while nothing runs, so that nothing else will make room; a program allocates explicit pages. Of the last two there would
be enough with what is kept for the shares of tenants: `own` if the tenant of the sequence exceeds its share and runs
others too, `excess` if not."""


class Holder(NamedTuple):
    """Something that can give up pages."""

    kind: Literal["waiting", "running", "pin", "space"]
    """A sequence that waits; one with a slot; the pin that `Retention` chooses; the youngest space, or all exports."""
    seq: int = 0
    """Number of the sequence; 0 for pins and spaces."""
    num_pages: int = 0
    urgency: tuple[bool, int] = (False, 0)
    """(whether it is background work, priority)."""
    rank: Rank | None = None
    tenant: str = ""


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
    def has_pins(self) -> bool:
        """Whether a prefix is pinned."""
        return self._cache.retention.has_pins

    def waiting(self) -> Iterator[Holder]:
        """Sequences with pages and work that wait for a slot or for another sequence, in no order."""
        needy = 0 if self.needy is None else self.needy.seq
        for sequence in self._sequences.without_slot.values():
            if sequence.seq != needy and sequence.state is not SequenceState.IDLE:
                yield _holder("waiting", sequence, self._sequences)

    def excess(self, tenant: str) -> float:
        """Pages that the sequences of a tenant use beyond its fair share."""
        return self._cache.tiers.excess_in_use(tenant)

    @property
    def fits_share(self) -> bool:
        """Whether the tenant in need holds no more than its fair share once it has what is missing."""
        return self.needy is not None and self._cache.tiers.shares.excess(self.needy.tenant) + self.missing <= 0

    def running(self) -> Iterator[Holder]:
        """Sequences with a slot, in no order."""
        return (_holder("running", sequence, self._sequences) for sequence in self._sequences.running.values())


class ByRank:
    """The sequence of the last rank that waits gives first, then running sequences of later rank than the one in need
    (*preemption*). So the first in rank always gets on, and all others after it.

    To write, pins give after these, and spaces where nothing else runs. To admit, only waiting sequences of later rank
    give pages: one that comes back from the host part by part keeps what it has until its turn. They keep their pages
    where these would not be enough, unless nothing runs. Of running ones only background work is preempted for other
    work, and for its own kind what has a less urgent priority. Programs get explicit pages from waiting sequences
    alone.

    What is kept for the shares of tenants is spared where other sequences can give. For a tenant that exceeds its
    share, these are its own of later rank, so its first one gets on. For a tenant that stays within its share, it is
    the running one of the last rank that uses nothing but what its tenant has beyond its share; or, where the tenant
    runs others too, whose tenant has beyond its share at least what is missing: the rest of the sequence's KV stays
    cached. So tenants at their shares preempt none of each other's.
    """

    def choose(self, view: ReclaimView) -> list[Holder]:
        """The first holder of the order above that the purpose allows, or several that wait, in the order in which they
        give until enough is free; none: the one in need has to wait."""
        if view.purpose == "write":
            return _last_first(view.waiting()) or _if_any(self._running(view) or self._last(view))
        if view.purpose == "own":
            return _if_any(self._last_own(view))
        if view.purpose == "excess":
            return _if_any(self._last_beyond_share(view))
        if view.missing > 0:
            later = self._later(view)
            if later and (view.purpose == "start" or sum(holder.num_pages for holder in later) >= view.missing):
                return _last_first(later)
        return [] if view.purpose == "spaces" else _if_any(self._running(view))

    def _later(self, view: ReclaimView) -> list[Holder]:
        needy = view.needy
        return [holder for holder in view.waiting() if needy is None or _rank(holder) > _rank(needy)]

    def _last_own(self, view: ReclaimView) -> Holder | None:
        needy = view.needy
        for holders in (view.waiting, view.running):
            later = [h for h in holders() if needy and h.tenant == needy.tenant and _rank(h) > _rank(needy)]
            if later:
                return max(later, key=_rank)
        return None

    def _last_beyond_share(self, view: ReclaimView) -> Holder | None:
        needy = view.needy
        if needy is None or not view.fits_share:
            return None
        running = list(view.running())
        num_running = Counter(holder.tenant for holder in running)
        beyond = (
            h
            for h in running
            if h.tenant != needy.tenant
            and h.urgency >= needy.urgency
            and view.excess(h.tenant) >= (min(view.missing, h.num_pages) if num_running[h.tenant] > 1 else h.num_pages)
        )
        return max(beyond, key=_rank, default=None)

    def _running(self, view: ReclaimView) -> Holder | None:
        victim, needy = max(view.running(), key=_rank, default=None), view.needy
        if victim is None or needy is None or victim.seq == needy.seq or _rank(victim) < _rank(needy):
            return None
        if view.purpose != "write" and victim.urgency <= needy.urgency:
            return None
        return victim

    def _last(self, view: ReclaimView) -> Holder | None:
        """For one that only sequences of an earlier rank run beside: these go on, and give their pages at their end,
        so that no program loses its pages for it."""
        if view.has_pins:
            return Holder("pin")
        is_last_of_several = any(view.needy is None or holder.seq != view.needy.seq for holder in view.running())
        return None if is_last_of_several else Holder("space")


def _holder(kind: Literal["waiting", "running"], sequence: Sequence, sequences: SequenceTable) -> Holder:
    urgency = sequence.is_background, sequence.priority
    rank = sequences.rank(sequence)
    return Holder(kind, sequence.seq, len(sequence.table.pages), urgency, rank, sequence.tenant)


def _last_first(holders: Iterable[Holder]) -> list[Holder]:
    return sorted(holders, key=_rank, reverse=True)


def _if_any(holder: Holder | None) -> list[Holder]:
    return [] if holder is None else [holder]


def _rank(holder: Holder) -> Rank:
    assert holder.rank is not None, "only sequences are compared by rank"
    return holder.rank
