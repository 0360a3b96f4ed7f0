"""`RequestTracker`: the client's state between a command and its answer, independent of the transport.

Owns the operations that have not ended (all of them fail when the engine dies), the pings that wait for statistics, the
drains that wait for their end, and the tasks that wait for an engine. Used from one event loop; `inline.py`,
`supervisor.py` and `attached.py` move the messages.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from weft.abi.errors import EngineDead, WeftError
from weft.core.wire import (
    Cancelled,
    Command,
    Drain,
    Drained,
    EngineInfo,
    EngineStats,
    Envelope,
    Event,
    Failed,
    Finished,
    ListSessions,
    Ping,
    Sessions,
    Stats,
    answered_op,
)
from weft.engine.client import OnEnvelope


class RequestTracker:
    """Tracks the commands of one client of one engine, across restarts of the engine.

    `deliver` carries commands to the engine and must not block.
    """

    def __init__(self, deliver: Callable[[list[Command]], None]):
        self._deliver = deliver
        self._on_envelope: OnEnvelope = lambda envelope: None
        self._info: EngineInfo | None = None
        self._dead: WeftError | None = EngineDead("the engine has not started yet; await wait_ready() first")
        self._open: set[int] = set()
        self._pings: deque[asyncio.Future[EngineStats]] = deque()
        self._latest: EngineStats | None = None
        self._queries: dict[int, asyncio.Future[Sessions]] = {}
        """Lists of sessions that were asked for, by number."""
        self._query_numbers = itertools.count(1)
        self._drains: list[asyncio.Future[None]] = []
        self._arrivals: list[asyncio.Future[EngineInfo]] = []
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        """What the engine serves; while a new engine starts, what the last one served. Raises `EngineDead`."""
        if self._info is None:
            raise self._dead or EngineDead("the engine has not started yet")
        return self._info

    @property
    def ready(self) -> bool:
        """Whether commands may be sent."""
        return self._dead is None

    def subscribe(self, on_envelope: OnEnvelope) -> None:
        """Set the receiver of operations' events."""
        self._on_envelope = on_envelope

    def begin(self, info: EngineInfo) -> None:
        """An engine is ready: wake the tasks in `until_ready`."""
        self._info = info
        self._dead = None
        self._latest = None
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(info)

    async def until_ready(self) -> EngineInfo:
        """Wait until an engine is ready. Raises `EngineDead` once no other engine will come."""
        if self._dead is None:
            return self.info
        if self._closed:
            raise EngineDead(self._dead.message)
        arrival: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._arrivals.append(arrival)
        try:
            return await arrival
        finally:
            # A task that gives up waiting leaves nothing. `begin` and `close` have taken the future out already.
            if arrival in self._arrivals:
                self._arrivals.remove(arrival)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands as one message. Raises `EngineDead` while there is no engine."""
        if self._dead is not None:
            raise EngineDead(self._dead.message)
        for command in commands:
            op = answered_op(command)
            if op is not None:
                self._open.add(op)
        self._deliver(list(commands))

    def receive(self, envelope: Envelope) -> None:
        """Route the events of an engine's message to their operations."""
        rest = [event for event in envelope.events if not self._take(event)]
        if rest:
            self._on_envelope(Envelope(envelope.step_id, rest))

    @property
    def latest_stats(self) -> EngineStats | None:
        """The last statistics of the engine that is there; None: it has sent none."""
        return None if self._dead is not None else self._latest

    async def stats(self) -> EngineStats:
        """Ask the engine for its statistics. Raises `EngineDead`."""
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self.send([Ping()])
        self._pings.append(future)
        return await future

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        """Ask the engine for the sequences of a tenant that wait. Raises `EngineDead`."""
        query = next(self._query_numbers)
        future: asyncio.Future[Sessions] = asyncio.get_running_loop().create_future()
        self.send([ListSessions(query=query, tenant=tenant, limit=limit)])
        self._queries[query] = future
        try:
            return await future
        finally:
            self._queries.pop(query, None)

    async def drain(self) -> None:
        """Ask for no new sequences, and wait for the last to go."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.send([Drain()])
        self._drains.append(future)
        await future

    def fail(self, error: WeftError) -> None:
        """The engine is gone: every open operation, ping and drain fails with the error. Where none is open, the
        subscriber hears of it as a failure of operation 0."""
        self._dead = error
        failed = [Failed.of(op, error) for op in sorted(self._open)] or [Failed.of(0, error)]
        self._open.clear()
        waiting: list[asyncio.Future[Any]] = [*self._pings, *self._queries.values(), *self._drains]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDead(error.message))
        self._pings.clear()
        self._queries.clear()
        self._drains.clear()
        self._on_envelope(Envelope(0, list[Event](failed)))

    def close(self, error: WeftError) -> None:
        """The engine is gone and no other one will come: as `fail`, and `until_ready` raises."""
        self._closed = True
        self.fail(error)
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_exception(EngineDead(error.message))

    def _take(self, event: Event) -> bool:
        """Handle an event of the connection itself. Returns False for an event of the subscriber."""
        if isinstance(event, Finished | Failed | Cancelled):
            self._open.discard(event.op)
        elif isinstance(event, Stats):
            self._latest = event.stats
            if self._pings:
                ping = self._pings.popleft()
                if not ping.done():
                    ping.set_result(event.stats)
            return True
        elif isinstance(event, Sessions):
            query = self._queries.pop(event.query, None)
            if query is not None and not query.done():
                query.set_result(event)
            return True
        elif isinstance(event, Drained):
            for drain in self._drains:
                if not drain.done():
                    drain.set_result(None)
            self._drains.clear()
            return True
        return False


class TrackingClient:
    """The part of `weft.engine.client.EngineClient` that is the same however messages travel."""

    def __init__(self, deliver: Callable[[list[Command]], None]):
        self._requests = RequestTracker(deliver)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises `EngineDead` before the first `wait_ready`."""
        return self._requests.info

    @property
    def ready(self) -> bool:
        """Whether the engine answers now."""
        return self._requests.ready

    @property
    def latest_stats(self) -> EngineStats | None:
        """The statistics that the engine sent last; None: it is down, or has sent none."""
        return self._requests.latest_stats

    @property
    def num_restarts(self) -> int:
        """How often a dead engine was replaced."""
        return 0

    def subscribe(self, on_envelope: OnEnvelope) -> None:
        """Set the receiver of all events."""
        self._requests.subscribe(on_envelope)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands, in order, as one message. Raises `EngineDead` while the engine is down."""
        self._requests.send(commands)

    async def stats(self) -> EngineStats:
        """The engine's statistics of this moment. Raises `EngineDead`."""
        return await self._requests.stats()

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        """The `limit` sequences of a tenant that wait longest, of all clients. Raises `EngineDead`."""
        return await self._requests.sessions(tenant, limit)

    async def drain(self) -> None:
        """Have the engine refuse new sequences, and wait until the last one is released."""
        await self._requests.drain()
