"""Names of hosts to addresses, on threads of their own: a name server that does not answer holds up nobody else.

Owns those threads, and that no tenant has more than its share of them: the system's resolver cannot be interrupted, so
a thread is taken until it returns, whatever became of who asked. `weft.programs.network` calls it, from one event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

MAX_THREADS = 32
TENANT_THREADS = 8
"""Of those, what one tenant may have at work at once; what it asks beyond waits."""

Look = Callable[[str, int], Sequence[str]]
"""Addresses of a host, in order of preference; blocks. Raises `OSError`."""


def look_up(host: str, port: int) -> list[str]:
    """As the system resolves it."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Resolver:
    """`resolve`, until it is closed."""

    def __init__(self, look: Look = look_up):
        self._look = look
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="weft-resolve")
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant; there for as long as somebody waits for one, or has a thread."""

    async def resolve(self, tenant: str, host: str, port: int) -> Sequence[str]:
        """Addresses of a host. Raises `OSError`."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = asyncio.Semaphore(TENANT_THREADS)
        await share.acquire()
        loop = asyncio.get_running_loop()
        try:
            found = self._threads.submit(self._look, host, port)
        except BaseException:
            share.release()
            raise
        held = share  # kept alive by what follows, also where whoever asked has given up

        def over(_: Future[Sequence[str]]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(held.release)

        found.add_done_callback(over)
        return await asyncio.wrap_future(found)

    def close(self) -> None:
        """Look nothing up any more; what is under way ends in its own time. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
