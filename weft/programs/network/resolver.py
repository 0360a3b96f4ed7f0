"""Addresses of host names, looked up on threads of their own: a name server that does not answer delays one tenant.

Owns those threads. The system's resolver cannot be interrupted, so a thread is taken until it returns, also where the
caller was cancelled, and counts against its tenant's share until then. `weft.programs.network.client` calls it, from
one event loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial

from weft.threads import FairThreads

MAX_THREADS = 32
TENANT_THREADS = 8
"""Of those, what one tenant may have at work at once; what it asks beyond waits."""

Look = Callable[[str, int], Sequence[str]]
"""Addresses of a host, in order of preference; blocks. Raises `OSError`."""


def look_up(host: str, port: int) -> list[str]:
    """As the system resolves it."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """Resolves names until it is closed."""

    def __init__(self, look: Look = look_up):
        self._look = look
        self._threads = FairThreads(MAX_THREADS, per_tenant=TENANT_THREADS, name="weft-resolve")

    async def resolve(self, tenant: str, host: str, port: int) -> Sequence[str]:
        """Addresses of a host. Raises `OSError`."""
        return await self._threads.run(partial(self._look, host, port), tenant=tenant)

    def close(self) -> None:
        """Look nothing up any more; what is under way ends in its own time. Idempotent."""
        self._threads.close()
