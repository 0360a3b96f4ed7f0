"""`AttachedEngine`: a client of an engine process that another process starts and watches.

Owns its connection and its lease, which pings renew. Its user (the program host, which hears of engines from the front)
attaches it to an address, and detaches it when the engine there has died; then every open operation fails with
`EngineDead`.
"""

from __future__ import annotations

import asyncio
import contextlib

from weft.abi.errors import EngineDead, WeftError
from weft.core.wire import Command, EngineInfo, Envelope, Failed, Hello, Welcome
from weft.engine.connection import Connection
from weft.engine.request_tracker import TrackingClient

PING_EVERY_S = 1.0


class AttachedEngine(TrackingClient):
    """Implements `weft.engine.client.EngineClient`. Used from one event loop."""

    def __init__(self, *, ping_every_s: float = PING_EVERY_S):
        """`ping_every_s` must be well below the engine's lease."""
        super().__init__(self._deliver)
        self._ping_every_s = ping_every_s
        self._connection: Connection | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._refused: WeftError | None = None
        self._closed = False

    @property
    def attached(self) -> bool:
        """Whether it has an address. The engine there may not have answered yet."""
        return self._connection is not None

    def attach(self, address: str) -> None:
        """Connect to the engine at this address. Operations that are open on another one fail."""
        self.detach(EngineDead("the engine was replaced by another one; start again"))
        if self._closed:
            return
        self._refused = None
        self._connection = Connection(address, self._receive)
        self._connection.send([Hello()])

    def detach(self, error: WeftError) -> None:
        """Disconnect, and fail open operations with the error. Idempotent."""
        self._ready.clear()
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._requests.fail(error)

    async def wait_ready(self) -> EngineInfo:
        """Wait until it is attached and the engine has answered. Raises the error with which the engine refused."""
        await self._ready.wait()
        if self._refused is not None:
            raise self._refused
        return self.info

    async def close(self) -> None:
        """Disconnect; the engine goes on. Idempotent."""
        self._closed = True
        self.detach(EngineDead("the client was closed"))
        self._refused = self._refused or EngineDead("the client was closed")
        self._ready.set()

    # ---- inside

    def _deliver(self, commands: list[Command]) -> None:
        if self._connection is not None:
            self._connection.send(commands)

    def _receive(self, envelope: Envelope) -> None:
        if self.ready:
            self._requests.receive(envelope)
            return
        for event in envelope.events:
            if isinstance(event, Welcome):
                self._requests.begin(event.info)
                self._ready.set()
                self._pinging = asyncio.create_task(self._ping(), name="weft-lease")
            elif isinstance(event, Failed) and event.op == 0:
                self._refused = event.error.error()
                self._ready.set()

    async def _ping(self) -> None:
        """Renew the lease. An engine in a long step answers late, so pings do not wait for each other."""
        waiting: set[asyncio.Future[object]] = set()
        while True:
            with contextlib.suppress(EngineDead):
                ping: asyncio.Future[object] = asyncio.ensure_future(self.stats())
                waiting.add(ping)
                ping.add_done_callback(waiting.discard)
                ping.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.sleep(self._ping_every_s)
