"""`FairFifo`: keys of tenants up to a common limit. Beyond it, the tenant that has most keys loses its oldest ones.

So a tenant that has its share of the limit or less loses nothing, however many keys others add, and a single tenant may
have all of them. The share is the limit divided by the tenants that have keys. Each key that is added or lost takes
constant time. Tenants without keys are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairFifo(Generic[K]):
    """Keys by tenant, the oldest first."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._keys: dict[str, OrderedDict[K, None]] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        """Tenants by number of keys, first the one that has had so many for longest."""
        self._most = 0
        """The largest of those numbers."""
        self.total = 0
        """How many keys there are."""

    def of(self, tenant: str) -> Collection[K]:
        """The keys of a tenant."""
        return self._keys.get(tenant, ())

    def add(self, tenant: str, keys: Iterable[K]) -> list[K]:
        """Add keys as the newest of a tenant, those too that it has already. Returns the keys that are lost."""
        own = self._keys.setdefault(tenant, OrderedDict())
        before = len(own)
        for key in keys:
            own[key] = None
            own.move_to_end(key)
        self._count(tenant, before, len(own))
        lost: list[K] = []
        while self.total > self._capacity:
            self._lose(lost)
        return lost

    def _lose(self, lost: list[K]) -> None:
        """The tenant that has most keys loses as many as are too many, but keeps its share."""
        tenant = next(iter(self._by_count[self._most]))
        own = self._keys[tenant]
        share = self._capacity // len(self._keys)
        num_lost = min(self.total - self._capacity, max(self._most - share, 1))
        lost += [own.popitem(last=False)[0] for _ in range(num_lost)]
        self._count(tenant, self._most, len(own))

    def _count(self, tenant: str, before: int, after: int) -> None:
        """A tenant that had `before` keys has `after`."""
        if not after:
            del self._keys[tenant]
        if before == after:
            return
        self.total += after - before
        if before:
            del self._by_count[before][tenant]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[tenant] = None
        self._most = max(self._most, after)
        while self._most not in self._by_count:  # at most as often as the tenant lost keys
            self._most -= 1
