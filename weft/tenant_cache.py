"""Values that are kept by tenant and key, within a bound for each tenant and one for all.

Owns the choice of the values that are dropped. A tenant neither finds the values of another, whose presence would show
by the time that a request takes, nor drops them by many of its own: beyond the bound for all, the tenant with the most
values loses one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _none_is_held(tenant: str, key: object) -> bool:
    return False


class TenantCache(Generic[K, V]):
    """The least recently used value of a tenant is dropped first. Not to be used by several threads at once."""

    def __init__(self, per_tenant: int, total: int, is_held: Callable[[str, K], bool] = _none_is_held):
        """Values that `is_held` tells of are not dropped, even beyond the bounds."""
        self._per_tenant, self._total = per_tenant, total
        self._is_held = is_held
        self._values: dict[str, OrderedDict[K, V]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def peek(self, tenant: str, key: K) -> V | None:
        """The value, which does not become the most recently used one."""
        own = self._values.get(tenant)
        return None if own is None else own.get(key)

    def get(self, tenant: str, key: K) -> V | None:
        """The value, which becomes the most recently used one of its tenant."""
        value = self.peek(tenant, key)
        if value is not None:
            self._values[tenant].move_to_end(key)
        return value

    def put(self, tenant: str, key: K, value: V) -> None:
        """Keep a value as the most recently used one of its tenant, and drop others beyond the bounds."""
        own = self._values.setdefault(tenant, OrderedDict())
        newest = tenant, key
        own[key] = value
        own.move_to_end(key)
        if len(own) > self._per_tenant:
            for oldest in list(self._droppable(tenant, newest))[: len(own) - self._per_tenant]:
                del own[oldest]
        for _ in range(len(self) - self._total):
            if not self._drop_of_largest(newest):
                return

    def pop(self, tenant: str, key: K) -> None:
        """Drop a value, if it is there."""
        own = self._values.get(tenant)
        if own is not None:
            own.pop(key, None)
            if not own:
                del self._values[tenant]

    def _droppable(self, tenant: str, newest: tuple[str, K]) -> Iterator[K]:
        """The keys of a tenant's values that may be dropped, least recently used first."""
        return (key for key in self._values[tenant] if (tenant, key) != newest and not self._is_held(tenant, key))

    def _drop_of_largest(self, newest: tuple[str, K]) -> bool:
        """Drop a value of the tenant that has the most, among those that have one to drop."""
        for tenant in sorted(self._values, key=lambda each: -len(self._values[each])):
            oldest = next(self._droppable(tenant, newest), None)
            if oldest is not None:
                self.pop(tenant, oldest)
                return True
        return False
