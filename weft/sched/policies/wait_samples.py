"""`WaitSamples`: the last waits per tenant and kind, and per kind over all tenants, in bounded memory.

A *group* is one kind of one tenant, or one kind over all tenants. It keeps the last `MAX_SAMPLES` waits in a ring. Each
group has a slot, a row of two arrays that grow with the number of groups; so waits are looked up for thousands of runs
at once. Least recently observed groups are replaced, in a way that invented kinds do not push out those in use: a group
without `ENOUGH` samples goes first where these fill a quarter of the room, and a tenant replaces only its own kinds
beyond `KINDS_PER_TENANT`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weft.core.step import F64, I64, Bool

ENOUGH = 20
"""Samples from which a group is used."""
WIDTH = 128
"""Columns of a slot."""
MAX_SAMPLES = WIDTH - 1
"""The last column stays inf."""
MAX_GROUPS = 2048
"""Groups of tenants, about 2 KiB each."""
KINDS_PER_TENANT = 64
SHARED_KINDS = 256


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


class SortedSamples:
    """Samples of every slot in ascending order.

    `seconds` [slots, WIDTH], then inf; `counts` [slots]. `_keys` [slots, WIDTH] has the same samples as (slot,
    seconds): complex numbers, which are in the order of their real, then of their imaginary part, so that one search
    finds the places of samples of many slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.seconds: F64 = np.full((num_slots, WIDTH), np.inf)
        self.counts: I64 = np.zeros(num_slots, np.int64)
        self._keys = _empty_keys(0, num_slots)
        self._num_samples = 0

    def at_least(self, slots: I64, wanted_s: F64) -> tuple[I64, I64]:
        """Two [n], for each of `slots` [n] and `wanted_s` [n], which is finite: the place in all of `seconds`, row
        after row, of the first sample that is at least so long, and how many are."""
        if not self._num_samples:
            return slots * WIDTH, np.zeros(len(slots), np.int64)
        keys = np.empty(len(slots), np.complex128)
        keys.real, keys.imag = slots, wanted_s
        first = self._keys.reshape(-1).searchsorted(keys)
        how_many = self.counts.take(slots)
        how_many -= first
        how_many += slots * WIDTH
        return first, how_many

    def put(self, slot: int, seconds: F64) -> None:
        """Replace the samples of a slot."""
        count = len(seconds)
        self._num_samples += count - int(self.counts[slot])
        self.counts[slot] = count
        self._keys.imag[slot, count:] = self.seconds[slot, count:] = np.inf
        self._keys.imag[slot, :count] = self.seconds[slot, :count] = np.sort(seconds)

    def grow(self) -> None:
        """Have twice as many slots."""
        size = len(self.counts)
        self.seconds = np.concatenate([self.seconds, np.full_like(self.seconds, np.inf)])
        self._keys = np.concatenate([self._keys, _empty_keys(size, size)])
        self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])


class WaitSamples:
    """Waits that `ended`, and those whose runs were `given_up` before they did, after how long. Slot 0 is empty
    forever; `is_own` [slots]: the samples are one tenant's.

    A run that is given up early tells nothing of longer waits: its wait might have ended later.
    """

    def __init__(self) -> None:
        self.ended = SortedSamples(16)
        self.given_up = SortedSamples(16)
        self.is_own: Bool = np.zeros(16, np.bool_)
        self._rings: F64 = np.zeros((16, WIDTH))
        self._has_ended: Bool = np.zeros((16, WIDTH), np.bool_)
        """Of the waits in `_rings`."""
        self._num_slots = 1
        self._num_groups = 0
        self._shared = _Kinds(SHARED_KINDS)
        self._tenants: OrderedDict[str, _Kinds] = OrderedDict()
        self._table: I64 | None = None
        """What `slots` returned last, for `_names`; None once a group was replaced or has become usable."""
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def add(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True) -> None:
        """Note a wait that lasted `wait_s` seconds, until it ended or its run was given up; what is negative or not
        finite is ignored."""
        if not 0.0 <= wait_s < np.inf:
            return
        self._note(self._shared, kind, wait_s, ended)
        kinds = self._tenants.get(tenant)
        if kinds is None:
            kinds = self._tenants[tenant] = _Kinds(KINDS_PER_TENANT)
        self._tenants.move_to_end(tenant)
        self._note(kinds, kind, wait_s, ended)

    def slots(self, tenants: tuple[str, ...], kinds: tuple[str, ...]) -> I64:
        """[max(1, tenants), kinds] slot to estimate from: the tenant's own where it has enough samples, else that of
        all tenants, else 0. Kept while neither the names nor the usable groups change."""
        if self._table is None or self._names != (tenants, kinds):
            columns = {kind: column for column, kind in enumerate(kinds)}
            table = np.zeros((max(1, len(tenants)), len(kinds)), np.int64)
            for kind, slot in self._shared.used():
                if kind in columns:
                    table[:, columns[kind]] = slot
            for row, tenant in enumerate(tenants):
                if own := self._tenants.get(tenant):
                    for kind, slot in own.used():
                        if kind in columns:
                            table[row, columns[kind]] = slot
            self._table, self._names = table, (tenants, kinds)
        return self._table

    def _note(self, kinds: _Kinds, kind: str, wait_s: float, ended: bool) -> None:
        group = kinds.get(kind)
        if group is None:
            group = _Group(self._free_slot(kinds))
        slot, place = group.slot, group.num_observed % MAX_SAMPLES
        count = min(group.num_observed + 1, MAX_SAMPLES)
        changed = {ended, bool(self._has_ended[slot, place])} if group.num_observed >= MAX_SAMPLES else {ended}
        self._rings[slot, place], self._has_ended[slot, place] = wait_s, ended
        waits, have_ended = self._rings[slot, :count], self._has_ended[slot, :count]
        for has_ended in changed:
            samples = self.ended if has_ended else self.given_up
            samples.put(slot, waits[have_ended == has_ended])
        group.num_observed += 1
        if group.num_observed == ENOUGH:
            self._table = None
        kinds.put(kind, group)

    def _free_slot(self, kinds: _Kinds) -> int:
        """A slot for a new group of `kinds`, of a group that is replaced where there is no room for more."""
        is_shared = kinds is self._shared
        if kinds.is_full:
            return self._clear(kinds.replace())
        if not is_shared and self._num_groups >= MAX_GROUPS:
            # The tenant that was observed longest ago has at least one group, unless it is the one that is new.
            tenant, oldest = next((t, k) for t, k in self._tenants.items() if len(k))
            slot = self._clear(oldest.replace())
            if not len(oldest) and oldest is not kinds:
                del self._tenants[tenant]
            return slot
        self._num_groups += not is_shared
        slot, self._num_slots = self._num_slots, self._num_slots + 1
        if slot == len(self.is_own):
            self.ended.grow()
            self.given_up.grow()
            self._rings = np.concatenate([self._rings, np.zeros_like(self._rings)])
            self._has_ended = np.concatenate([self._has_ended, np.zeros_like(self._has_ended)])
            self.is_own = np.concatenate([self.is_own, np.zeros_like(self.is_own)])
        self.is_own[slot] = not is_shared
        return slot

    def _clear(self, group: _Group) -> int:
        for samples in (self.ended, self.given_up):
            samples.put(group.slot, np.zeros(0))
        if group.num_observed >= ENOUGH:
            self._table = None
        return group.slot


def _empty_keys(first: int, count: int) -> npt.NDArray[np.complex128]:
    keys = np.empty((count, WIDTH), np.complex128)
    keys.real, keys.imag = np.arange(first, first + count)[:, None], np.inf
    return keys
