"""`Conversation`: the client's side of the wire, whatever carries it.

Owns what must be remembered between a command and its answer: the operations that have not ended (so that all of them
can be failed when the engine dies), pings waiting for statistics, drains waiting for their end. Used from one event
loop; `inline.py` and `process.py` move the messages.
"""

from __future__ import annotations

import asyncio
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
    Ping,
    Stats,
    is_answered,
)
from weft.engine.client import OnEnvelope


class Conversation:
    """See the module's docstring. `deliver` carries commands to the engine and must not block."""

    def __init__(self, deliver: Callable[[list[Command]], None]):
        self._deliver = deliver
        self._on_envelope: OnEnvelope = lambda envelope: None
        self._info: EngineInfo | None = None
        self._dead: WeftError | None = EngineDead("the engine has not started yet; await wait_ready() first")
        self._open: set[int] = set()
        self._pings: deque[asyncio.Future[EngineStats]] = deque()
        self._drains: list[asyncio.Future[None]] = []

    @property
    def info(self) -> EngineInfo:
        """What the engine serves; of the last engine, while a new one is starting."""
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
        """An engine is ready."""
        self._info = info
        self._dead = None

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands as one message. Raises `EngineDead` while there is no engine."""
        if self._dead is not None:
            raise EngineDead(self._dead.message)
        for command in commands:
            if is_answered(command):
                self._open.add(command.op)  # type: ignore[union-attr]
        self._deliver(list(commands))

    def receive(self, envelope: Envelope) -> None:
        """An engine's message."""
        rest = [event for event in envelope.events if not self._take(event)]
        if rest:
            self._on_envelope(Envelope(envelope.step_id, rest))

    async def stats(self) -> EngineStats:
        """Ask for a picture of the engine. Raises `EngineDead`."""
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self.send([Ping()])
        self._pings.append(future)
        return await future

    async def drain(self) -> None:
        """Ask for no new sequences, and wait for the last to go."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.send([Drain()])
        self._drains.append(future)
        await future

    def fail(self, error: WeftError) -> None:
        """The engine is gone: every operation ends, every question is answered with the error."""
        self._dead = error
        failed = [Failed(op=op, kind=error.kind, message=error.message) for op in sorted(self._open)]
        self._open.clear()
        waiting: list[asyncio.Future[Any]] = [*self._pings, *self._drains]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDead(error.message))
        self._pings.clear()
        self._drains.clear()
        if failed:
            self._on_envelope(Envelope(0, list[Event](failed)))

    def _take(self, event: Event) -> bool:
        """Note what an event means here; True when it is not for the subscriber."""
        if isinstance(event, Finished | Failed | Cancelled):
            self._open.discard(event.op)
        elif isinstance(event, Stats):
            if self._pings:
                ping = self._pings.popleft()
                if not ping.done():
                    ping.set_result(event.stats)
            return True
        elif isinstance(event, Drained):
            for drain in self._drains:
                if not drain.done():
                    drain.set_result(None)
            self._drains.clear()
            return True
        return False


class ConversingClient:
    """The part of `weft.engine.client.EngineClient` that is the same however messages travel."""

    def __init__(self, deliver: Callable[[list[Command]], None]):
        self._conversation = Conversation(deliver)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises `EngineDead` before the first `wait_ready`."""
        return self._conversation.info

    @property
    def ready(self) -> bool:
        """Whether the engine answers now."""
        return self._conversation.ready

    def subscribe(self, on_envelope: OnEnvelope) -> None:
        """Set the receiver of all events."""
        self._conversation.subscribe(on_envelope)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands, in order, as one message. Raises `EngineDead` while the engine is down."""
        self._conversation.send(commands)

    async def stats(self) -> EngineStats:
        """A fresh picture of the engine. Raises `EngineDead`."""
        return await self._conversation.stats()

    async def drain(self) -> None:
        """Have the engine take no new sequences and wait until the last one is gone."""
        await self._conversation.drain()
