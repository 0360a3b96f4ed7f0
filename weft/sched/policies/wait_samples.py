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

from weft.cache.runs import NEVER_S
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


class WaitSamples:
    """`sorted_s` [slots, WIDTH]: waits that ended, in ascending order, then inf; `counts` [slots] of them, `num_never`
    [slots] of those that did not end; `is_own` [slots] whether they are one tenant's. Slot 0 is empty forever.

    `_keys` [slots, WIDTH] has the same waits as (slot, seconds): complex numbers, which are in the order of their real,
    then of their imaginary part, so that one search finds the places of waits of many slots."""

    def __init__(self) -> None:
        self.sorted_s: F64 = np.full((16, WIDTH), np.inf)
        self._keys = _empty_keys(0, 16)
        self.counts: I64 = np.zeros(16, np.int64)
        self.num_never: I64 = np.zeros(16, np.int64)
        self.is_own: Bool = np.zeros(16, np.bool_)
        self._rings: F64 = np.zeros((16, WIDTH))
        self._num_slots = 1
        self._num_groups = 0
        self._shared = _Kinds(SHARED_KINDS)
        self._tenants: OrderedDict[str, _Kinds] = OrderedDict()
        self._table: I64 | None = None
        """What `slots` returned last, for `_names`; None once a group was replaced or has become usable."""
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def add(self, tenant: str, kind: str, wait_s: float) -> None:
        """Note a wait that ended after `wait_s` seconds, or did not (`NEVER_S`); what is negative or not finite is
        ignored."""
        if not 0.0 <= wait_s < np.inf:
            return
        self._note(self._shared, kind, wait_s)
        kinds = self._tenants.get(tenant)
        if kinds is None:
            kinds = self._tenants[tenant] = _Kinds(KINDS_PER_TENANT)
        self._tenants.move_to_end(tenant)
        self._note(kinds, kind, wait_s)

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

    def first_at_least(self, slots: I64, wanted_s: F64) -> I64:
        """[n] places in all of `sorted_s`, row after row: the first sample of each of `slots` [n] that is at least
        `wanted_s` [n], which is finite."""
        keys = np.empty(len(slots), np.complex128)
        keys.real, keys.imag = slots, wanted_s
        return self._keys.reshape(-1).searchsorted(keys)

    def _note(self, kinds: _Kinds, kind: str, wait_s: float) -> None:
        group = kinds.get(kind)
        if group is None:
            group = _Group(self._free_slot(kinds))
        ring, count = self._rings[group.slot], min(group.num_observed + 1, MAX_SAMPLES)
        ring[group.num_observed % MAX_SAMPLES] = np.inf if wait_s >= NEVER_S else wait_s
        self._keys.imag[group.slot, :count] = self.sorted_s[group.slot, :count] = np.sort(ring[:count])
        self.counts[group.slot] = ended = np.count_nonzero(ring[:count] < np.inf)
        self.num_never[group.slot] = count - ended
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
        if slot == len(self.counts):
            self.sorted_s = np.concatenate([self.sorted_s, np.full_like(self.sorted_s, np.inf)])
            self._keys = np.concatenate([self._keys, _empty_keys(slot, slot)])
            self._rings = np.concatenate([self._rings, np.zeros_like(self._rings)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.num_never = np.concatenate([self.num_never, np.zeros_like(self.num_never)])
            self.is_own = np.concatenate([self.is_own, np.zeros_like(self.is_own)])
        self.is_own[slot] = not is_shared
        return slot

    def _clear(self, group: _Group) -> int:
        self._keys.imag[group.slot] = self.sorted_s[group.slot] = np.inf
        self.counts[group.slot] = self.num_never[group.slot] = 0
        if group.num_observed >= ENOUGH:
            self._table = None
        return group.slot


def _empty_keys(first: int, count: int) -> npt.NDArray[np.complex128]:
    keys = np.empty((count, WIDTH), np.complex128)
    keys.real, keys.imag = np.arange(first, first + count)[:, None], np.inf
    return keys
