"""The bound on connections: their number, the one closed to make room for another, and stalled ones.

Owns the bounds on open files and unsent bytes of the front. Connections are hashable values here;
`weft.server.protocol` and `weft.server.run` close them.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping
from typing import Generic, TypeVar

C = TypeVar("C")

RESERVED_FILES = 256
"""Open files reserved for everything but connections: engines, the program host, databases, logs."""

logger = logging.getLogger("weft.server")


class Connections(Generic[C]):
    """The most connections, and those that wait for a request, longest wait first."""

    def __init__(self, most: int, header_timeout_s: float):
        self.most = most
        self.header_timeout_s = header_timeout_s
        self._waiting: dict[C, None] = {}

    def waits(self, connection: C) -> None:
        """Record that a connection waits for a request: it is new, or its last response is complete."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def works(self, connection: C) -> None:
        """Record that a connection has a request in progress, or is closed."""
        self._waiting.pop(connection, None)

    def longest_waiting(self) -> C:
        """The connection that has waited longest. Raises `StopIteration` if none waits."""
        return next(iter(self._waiting))


class StalledConnections(Generic[C]):
    """Finds connections whose clients do not read the written bytes."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._seen: dict[C, tuple[int, float]] = {}
        """Connection -> (unsent bytes, time since which this number is unchanged)."""

    def overdue(self, unsent: Mapping[C, int], now: float) -> list[C]:
        """Connections with the same number of unsent bytes at every call of the last `timeout_s` seconds.

        `unsent`: connection -> unsent bytes, for all connections.
        """
        seen = {}
        for connection, size in unsent.items():
            if size:
                before = self._seen.get(connection)
                seen[connection] = before if before is not None and before[0] == size else (size, now)
        self._seen = seen
        return [connection for connection, (_, since) in seen.items() if now - since >= self._timeout_s]


def max_connections(wanted: int) -> int:
    """The number of connections: `wanted`, or fewer, with a warning, if the limit of open files is too low. Raises that
    limit as far as permitted."""
    needed = wanted + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return allowed_connections(wanted, soft)


def allowed_connections(wanted: int, max_files: int) -> int:
    """The number of connections: `wanted`, or as many as `max_files` open files leave, with a warning."""
    needed = wanted + RESERVED_FILES
    if max_files == resource.RLIM_INFINITY or max_files >= needed:
        return wanted
    allowed = max(max_files - RESERVED_FILES, max_files // 2)
    logger.warning(
        "this process may open %d files, so it takes %d connections at once instead of %d (server.max_connections): "
        "raise the limit to %d (`ulimit -n`, or LimitNOFILE of systemd)",
        max_files,
        allowed,
        wanted,
        needed,
    )
    return allowed
