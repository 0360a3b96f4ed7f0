"""`WaitSamples`: the last waits per tenant and kind, and per kind over all tenants, in bounded memory.

A *group* is one kind of one tenant, one kind over all tenants, or one kind and cohort of one tenant. The group of a
cohort is used once it has enough waits; from then on the tenant's group of the kind gets those of others alone. A
group keeps the last `MAX_SAMPLES` waits in a ring. Each group has a slot, a row of arrays that grow with the number
of groups; so waits are looked up for thousands of runs at once. Least recently observed groups are replaced, in a way
that invented kinds do not push out those in use: a group without `ENOUGH` samples goes first where these fill a
quarter of the room, a tenant replaces only its own kinds beyond `KINDS_PER_TENANT`, and groups of cohorts go before
those of kinds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from weft.core.step import F64, I64, Bool
from weft.core.waits import without_cohort

Rows = TypeVar("Rows", F64, I64, Bool)

EPSILON = 1e-9
ENOUGH = 20
"""Samples from which a group is used."""
LASTED_ENOUGH = 5
"""Waits that lasted as long as the one in question; of fewer, no quantile is taken."""
WIDTH = 128
"""Columns of a slot, a power of two."""
STEPS = tuple(1 << bit for bit in reversed(range(WIDTH.bit_length() - 1)))
MAX_SAMPLES = WIDTH - 1
"""The last column stays inf."""
MAX_GROUPS = 2048
"""Groups of tenants, about 4 KiB each."""
KINDS_PER_TENANT = 64
COHORTS_PER_TENANT = 256
"""Kinds with a cohort. Most are of a single session and have few waits, so that the one observed longest ago goes."""
SHARED_KINDS = 256
MAX_TABLES = 4
"""Tables of slots that are kept."""


class _Group:
    __slots__ = ("num_observed", "slot")

    def __init__(self, slot: int):
        self.slot = slot
        self.num_observed = 0


class _Kinds:
    """Groups by kind, least recently observed first; those of few samples apart from those of enough."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._few: OrderedDict[str, _Group] = OrderedDict()
        self._enough: OrderedDict[str, _Group] = OrderedDict()

    def __len__(self) -> int:
        return len(self._few) + len(self._enough)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._capacity

    def get(self, kind: str) -> _Group | None:
        return self._few.get(kind) or self._enough.get(kind)

    def put(self, kind: str, group: _Group) -> None:
        """Enter a group, or note that it was observed now."""
        self._few.pop(kind, None)
        groups = self._enough if group.num_observed >= ENOUGH else self._few
        groups[kind] = group
        groups.move_to_end(kind)

    def replace(self) -> _Group:
        """Remove a group and return it."""
        few_first = len(self._few) > self._capacity // 4 or not self._enough
        return (self._few if few_first else self._enough).popitem(last=False)[1]

    def used(self) -> Iterator[tuple[str, int]]:
        """(kind, slot) of the groups that have enough samples."""
        return ((kind, group.slot) for kind, group in self._enough.items())


class Lasted(NamedTuple):
    """For each run, the waits in a slot that lasted at least as long as it has waited."""

    slots: I64
    """[n]."""
    waited_s: F64
    """[n] the time waited so far."""
    ended_s: F64
    """All waits of all slots that ended, one slot after the other; each ascends."""
    first: I64
    """[n] place in `ended_s` of the shortest that lasted as long; the others follow."""
    num_ended: I64
    """[n]."""
    num_given_up: I64
    """[n] of those whose runs were given up before they ended."""
    chance: F64
    """[n] the part of them that ended, also where fewer than `LASTED_ENOUGH` lasted as long: then that of waits as long
    as the longest of which so many are known. 1 where no wait is known."""

    def remaining_s(self, part: float) -> F64:
        """[n] the quantile `part` of the remaining times, between order statistics at part * (m + 1) of m, so that a
        new value is below it with probability `part`. Needs m >= 2; meaningless below."""
        place: F64 = self.num_ended * np.float64(part) + (part - 1.0)
        # The last sample is the upper one of a pair too: behind it there may be no other.
        np.minimum(place, self.num_ended - (1.0 + EPSILON), out=place)
        np.maximum(place, 0.0, out=place)
        low = place.astype(np.int64)
        place -= low
        low += self.first
        lower: F64 = self.ended_s.take(low)
        with np.errstate(invalid="ignore"):
            place *= self.ended_s[1:].take(low, mode="clip") - lower
            place += lower
            place -= self.waited_s
        return place


class WaitSamples:
    """`ended_s` [slots, WIDTH]: waits that ended, in ascending order, then inf. `is_own` [slots]: whether they are
    one tenant's. Slot 0 is empty forever.

    The wait of a client whose run was given up goes on, and its end is seen: until then it counts as a wait without an
    end, as long as it has lasted so far. A run that nothing waits for counts for as long as it was kept.

    The chance of an end is thus too small where many waits go on. An estimate that takes them to end like the others
    (Kaplan and Meier, 1958) is not used: it rests on the few longest waits, and says that all end where the longest one
    did. In simulated days of agents, whose last turns nobody continues, `min_waste` with it was no better than `lru`.
    """

    def __init__(self) -> None:
        self.ended_s: F64 = np.full((16, WIDTH), np.inf)
        self.is_own: Bool = np.zeros(16, np.bool_)
        self._counts: I64 = np.zeros((2, 16), np.int64)
        """[2, slots] of all waits, and of those that ended."""
        self._all_s: F64 = np.full((16, WIDTH), np.inf)
        """[slots, WIDTH] all waits in ascending order, then inf."""
        self._ended_from: I64 = np.zeros((16, WIDTH), np.int64)
        """[slots, WIDTH] how many of the waits of `_all_s` from this one on ended."""
        self._rings: F64 = np.zeros((16, WIDTH))
        self._since_s: F64 = np.full((16, WIDTH), np.nan)
        """[slots, WIDTH] when the waits in `_rings` that still go on began; nan: others."""
        self._now = -np.inf
        """The latest time that is known."""
        self._has_ended: Bool = np.zeros((16, WIDTH), np.bool_)
        """Of the waits in `_rings`."""
        self._num_slots = 1
        self._num_groups = 0
        self._shared = _Kinds(SHARED_KINDS)
        self._tenants: OrderedDict[str, _Kinds] = OrderedDict()
        self._cohorts: OrderedDict[str, _Kinds] = OrderedDict()
        """By tenant."""
        self._tables: list[tuple[tuple[tuple[str, ...], tuple[str, ...]], I64]] = []
        """What `slots` returned for (tenants, kinds), last used first; none once a group was replaced or has become
        usable."""

    def add(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = np.nan) -> None:
        """Note a wait that lasted `wait_s` seconds, until it ended or its run was given up; what is negative or not
        finite is ignored. With `since_s`, when it began, it is that of a client: if its run was given up it goes on,
        and counts once when it ends."""
        if not 0.0 <= wait_s < np.inf:
            return
        self._now = np.fmax(self._now, since_s + wait_s)
        plain = without_cohort(kind)
        self._note(self._shared, plain, wait_s, ended, since_s)
        own = self._of_tenant(self._tenants, tenant, KINDS_PER_TENANT)
        has_cohort = self.has_cohort(tenant, kind)
        self._note(own, plain, wait_s, ended, since_s, is_known=has_cohort)
        if kind != plain and (has_cohort or not self._all_end(own.get(plain))):
            self._note(self._of_tenant(self._cohorts, tenant, COHORTS_PER_TENANT), kind, wait_s, ended, since_s)

    def has_cohort(self, tenant: str, kind: str) -> bool:
        """Whether there are enough waits of a kind with its cohort."""
        cohorts = self._cohorts.get(tenant)
        group = None if cohorts is None else cohorts.get(kind)
        return group is not None and group.num_observed >= ENOUGH

    def _all_end(self, group: _Group | None) -> bool:
        """Whether all waits of a group have ended, so that cohorts have nothing to tell apart."""
        return group is None or self._counts[0, group.slot] == self._counts[1, group.slot]

    @staticmethod
    def _of_tenant(tenants: OrderedDict[str, _Kinds], tenant: str, capacity: int) -> _Kinds:
        """The groups of a tenant, which is observed now."""
        kinds = tenants.get(tenant)
        if kinds is None:
            kinds = tenants[tenant] = _Kinds(capacity)
        tenants.move_to_end(tenant)
        return kinds

    def lasted(self, slots: I64, waited_s: F64) -> Lasted:
        """The waits in `slots` [n] that lasted `waited_s` [n], which is finite, or longer."""
        starts, all_s = slots * WIDTH, self._all_s.reshape(-1)
        place = starts
        for step in STEPS:  # a binary search in all slots at once
            place = place + step * (all_s.take(place + (step - 1)) < waited_s)
        ended_from = self._ended_from.reshape(-1)
        num_ended = ended_from.take(place)
        num_all, all_ended = self._counts.take(slots, axis=1)
        ends = starts + num_all
        enough = np.maximum(np.minimum(place, ends - LASTED_ENOUGH), starts)
        num_lasted = ends - enough
        chance = np.divide(ended_from.take(enough), num_lasted, out=np.ones(len(slots)), where=num_lasted > 0)
        num_given_up = ends - place - num_ended
        starts += all_ended
        starts -= num_ended
        return Lasted(slots, waited_s, self.ended_s.reshape(-1), starts, num_ended, num_given_up, chance)

    def slots(self, tenants: tuple[str, ...], kinds: tuple[str, ...]) -> I64:
        """[max(1, tenants), kinds] slot to estimate from: the tenant's own where it has enough samples, else that of
        all tenants, else 0. The tables of the last `MAX_TABLES` names are kept until the usable groups change: both
        tiers ask in turn, each with its own names."""
        for place, (names, table) in enumerate(self._tables):
            if names == (tenants, kinds):
                if place:
                    self._tables.insert(0, self._tables.pop(place))
                return table
        table = self._make_table(tenants, kinds)
        self._tables = [((tenants, kinds), table), *self._tables[: MAX_TABLES - 1]]
        return table

    def _make_table(self, tenants: tuple[str, ...], kinds: tuple[str, ...]) -> I64:
        columns = {kind: column for column, kind in enumerate(kinds)}
        table = np.zeros((max(1, len(tenants)), len(kinds)), np.int64)
        for kind, slot in self._shared.used():
            if kind in columns:
                table[:, columns[kind]] = slot
        for row, tenant in enumerate(tenants):
            for groups in (self._tenants, self._cohorts):
                if own := groups.get(tenant):
                    for kind, slot in own.used():
                        if kind in columns:
                            table[row, columns[kind]] = slot
        of_tenants = table[: len(tenants)]
        for kind, column in columns.items():
            plain = without_cohort(kind)
            if plain != kind and plain in columns:
                slots = of_tenants[:, column]
                np.copyto(slots, of_tenants[:, columns[plain]], where=slots == 0)
        return table

    def _note(
        self, kinds: _Kinds, kind: str, wait_s: float, ended: bool, since_s: float, *, is_known: bool = False
    ) -> None:
        """Note a wait in a group; with `is_known`, only the end of one that is there."""
        group = kinds.get(kind)
        if is_known and (group is None or not ended or not (self._since_s[group.slot] == since_s).any()):
            return
        if group is None:
            group = _Group(self._free_slot(kinds))
        slot, place = group.slot, group.num_observed % MAX_SAMPLES
        went_on = self._since_s[slot] == since_s
        if ended and went_on.any():
            place = int(went_on.argmax())
        else:
            group.num_observed += 1
        self._rings[slot, place], self._has_ended[slot, place] = wait_s, ended
        self._since_s[slot, place] = np.nan if ended else since_s
        self._sort(slot, min(group.num_observed, MAX_SAMPLES))
        if group.num_observed == ENOUGH:
            self._tables = []
        kinds.put(kind, group)

    def _sort(self, slot: int, count: int) -> None:
        """Put the first `count` waits in the ring of a slot in order."""
        waits = np.fmax(self._rings[slot, :count], self._now - self._since_s[slot, :count])
        order = np.argsort(waits)
        waits, ended = waits[order], self._has_ended[slot, order]
        num_ended = np.count_nonzero(ended)
        self._counts[:, slot] = count, num_ended
        self._all_s[slot, :count], self._all_s[slot, count:] = waits, np.inf
        self._ended_from[slot, :count], self._ended_from[slot, count:] = ended[::-1].cumsum()[::-1], 0
        self.ended_s[slot, :num_ended], self.ended_s[slot, num_ended:] = waits[ended], np.inf

    def _free_slot(self, kinds: _Kinds) -> int:
        """A slot for a new group of `kinds`, of a group that is replaced where there is no room for more."""
        is_shared = kinds is self._shared
        if kinds.is_full:
            return self._clear(kinds.replace())
        if not is_shared and self._num_groups >= MAX_GROUPS:
            # Cohorts first. The tenant that was observed longest ago has a group, unless it is the one that is new.
            tenants = self._cohorts if any(len(k) for k in self._cohorts.values()) else self._tenants
            tenant, oldest = next((t, k) for t, k in tenants.items() if len(k))
            slot = self._clear(oldest.replace())
            if not len(oldest) and oldest is not kinds:
                del tenants[tenant]
            return slot
        self._num_groups += not is_shared
        slot, self._num_slots = self._num_slots, self._num_slots + 1
        if slot == len(self.is_own):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
            self.is_own, self._has_ended = _doubled(self.is_own), _doubled(self._has_ended)
            self.ended_s, self._all_s, self._rings = map(_doubled, (self.ended_s, self._all_s, self._rings))
            self._since_s = _doubled(self._since_s)
            self._ended_from = _doubled(self._ended_from)
            self.ended_s[slot:] = self._all_s[slot:] = np.inf
            self._since_s[slot:] = np.nan
        self.is_own[slot] = not is_shared
        return slot

    def _clear(self, group: _Group) -> int:
        self._since_s[group.slot] = np.nan
        self._sort(group.slot, 0)
        if group.num_observed >= ENOUGH:
            self._tables = []
        return group.slot


def _doubled(rows: Rows) -> Rows:
    """As many rows of zeros behind them."""
    return np.concatenate([rows, np.zeros_like(rows)])
