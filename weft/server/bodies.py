"""Request bodies in memory: how many bytes of them the server holds at once, in all and of each tenant."""

from __future__ import annotations

from collections import Counter

from weft.server.errors import HttpProblem, retry_headers


class BodyBudget:
    """Bytes of request bodies, from their arrival to the end of their decoding. Used from one event loop."""

    def __init__(self, max_bytes: int, num_tenants: int):
        self._max_bytes = max_bytes
        self._per_tenant = max_bytes if num_tenants < 2 else max_bytes // 2
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes of all bodies now."""
        return self._held.total()

    def take(self, tenant: str, size: int) -> None:
        """Count bytes that arrived. Raises `HttpProblem` 429 where there are too many; then none is counted."""
        if self.held + size <= self._max_bytes and self._held[tenant] + size <= self._per_tenant:
            self._held[tenant] += size
            return
        raise HttpProblem(
            429,
            "The request bodies that are arriving exceed what this server holds at once (server.max_bodies_bytes); "
            "try again shortly.",
            code="overloaded",
            headers={**retry_headers(1.0), "connection": "close"},
        )

    def give_back(self, tenant: str, size: int) -> None:
        """Forget bytes of a body that is decoded, or refused."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
