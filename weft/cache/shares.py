"""`FairShares`: how many pages of a tier each tenant holds, beside its fair share: the tier divided by the tenants that
hold any. Called by `weft.cache` and by the scheduler's `Reclaimer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

CLEARLY = 0.02
"""Part of its share by which a tenant exceeds it clearly: tenants at their shares are by turns over and within them."""


class FairShares:
    """Pages by tenant as they were when they were first asked for in a step."""

    def __init__(self, num_pages: int):
        """`num_pages`: of the tier."""
        self._num_pages = num_pages
        self.count_held: Callable[[], Mapping[str, int]] = dict
        """Pages of each tenant in the tier, in use or not."""
        self.counted: dict[str, int] | None = None
        """What was counted in this step; None: nothing yet, so it is counted when it is next asked for."""
        self._over: frozenset[str] = frozenset()
        self._clearly_over: frozenset[str] = frozenset()
        self._nearly_over: frozenset[str] = frozenset()

    @property
    def is_shared(self) -> bool:
        """Whether several tenants hold pages."""
        return len(self._count()) > 1

    @property
    def over(self) -> frozenset[str]:
        """The tenants that hold more than their share."""
        self._count()
        return self._over

    @property
    def clearly_over(self) -> frozenset[str]:
        """Those of them that hold more than their share by the part `CLEARLY` of it."""
        self._count()
        return self._clearly_over

    @property
    def nearly_over(self) -> frozenset[str]:
        """The tenants that hold more than their share less that part of it."""
        self._count()
        return self._nearly_over

    def excess(self, tenant: str) -> float:
        """Pages that a tenant holds beyond its share; negative within it."""
        held = self._count()
        return held.get(tenant, 0) - self._num_pages / max(len(held), 1)

    def _count(self) -> dict[str, int]:
        if self.counted is None:
            self.counted = {tenant: pages for tenant, pages in self.count_held().items() if pages}
            self._over = frozenset(tenant for tenant in self.counted if self.excess(tenant) > 0)
            clear = CLEARLY * self._num_pages / max(len(self.counted), 1)
            self._clearly_over = frozenset(tenant for tenant in self._over if self.excess(tenant) > clear)
            self._nearly_over = frozenset(tenant for tenant in self.counted if self.excess(tenant) >= -clear)
        return self.counted
