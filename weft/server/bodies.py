"""The bound on request bodies in memory, in bytes, for all tenants together and for each."""

from __future__ import annotations

from collections import Counter

from weft.server.errors import HttpProblem, retry_headers


class BodyBudget:
    """Counts bytes of request bodies, from arrival to the end of decoding. Used from one event loop."""

    def __init__(self, max_bytes: int, num_tenants: int):
        self._max_bytes = max_bytes
        self._per_tenant = max_bytes if num_tenants < 2 else max_bytes // 2
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes of all bodies held now."""
        return self._held.total()

    def take(self, tenant: str, size: int) -> None:
        """Count arrived bytes. Raises `HttpProblem` 429 if they exceed the bound; then they are not counted."""
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
        """Stop counting bytes of a body that was decoded or refused."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
