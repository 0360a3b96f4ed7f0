"""The bound on requests in progress, for all tenants and for each, and a prediction of the next free place."""

from __future__ import annotations

import math
from collections import Counter

from weft.abi.errors import Overloaded
from weft.core.place_forecast import PlaceForecast


class Places:
    """Counts the requests in progress. Used from one event loop; `now` is in seconds of one clock."""

    def __init__(self, most: int, num_tenants: int):
        self._most = most
        self._per_tenant = most if num_tenants < 2 else -(-most // 2)
        self._taken: Counter[str] = Counter()
        self._num_taken = 0
        self._forecast = PlaceForecast()

    @property
    def num_taken(self) -> int:
        """Number of requests in progress, of all tenants."""
        return self._num_taken

    def take(self, tenant: str, now: float) -> None:
        """Count a new request. Raises `Overloaded` with the time until a place is expected to be free for it, after the
        requests that were refused before."""
        if self._num_taken >= self._most:
            raise self._refusal(f"The server is answering {self._most} requests, its limit", now)
        if self._taken[tenant] >= self._per_tenant:
            raise self._refusal(f"The server is answering {self._per_tenant} of your requests, your share", now)
        self._taken[tenant] += 1
        self._num_taken += 1

    def give_back(self, tenant: str, now: float) -> None:
        """Free the place of an ended request, and update the rate of freed places."""
        self._num_taken -= 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._forecast.freed(now)

    def _refusal(self, what: str, now: float) -> Overloaded:
        wait_s = self._forecast.refused(now)
        return Overloaded(f"{what}; try again in {math.ceil(wait_s)} s.", retry_after_s=wait_s)
