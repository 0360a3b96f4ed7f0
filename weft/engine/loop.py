"""The loop around an engine: it takes commands from a mailbox, runs steps and sends events, until the mailbox stops.

Owns leases, pings and drains. The mailbox is the seam to clients: of processes in `process.py`, of threads in
`inline.py`.
"""

from __future__ import annotations

from typing import Protocol

from weft.abi.errors import WeftError
from weft.core.wire import PROTOCOL_VERSION as VERSION
from weft.core.wire import Command, Drain, Drained, Envelope, Event, Failed, Hello, ListSessions, Ping, Stats, Welcome
from weft.engine.engine import Engine

IDLE_WAIT_S = 1.0
"""How long an idle engine listens before it looks at its leases."""
ROOM_WAIT_S = 0.02
"""How long it listens before it looks whether commands have waited too long for room."""
COMPILING_WAIT_S = 0.001
"""How long it listens before it looks whether a grammar is ready."""


class Mailbox(Protocol):
    """Where an engine hears from its clients."""

    def receive(self, wait_s: float) -> list[tuple[int, list[Command]]]:
        """Messages that have come, in order; waits up to `wait_s` seconds for the first."""
        ...

    def send(self, client: int, envelope: Envelope) -> None:
        """Send to a client. Does nothing for one that has disconnected."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether the loop should end."""
        ...


class EngineLoop:
    """Runs one engine over one mailbox, in the calling thread."""

    def __init__(self, engine: Engine, mailbox: Mailbox, lease_s: float):
        self._engine = engine
        self._mailbox = mailbox
        self._lease_s = lease_s
        self._heard: dict[int, float] = {}
        self._draining: set[int] = set()

    def run(self) -> None:
        """Until the mailbox says stop. Raises what the worker raises."""
        engine, mailbox = self._engine, self._mailbox
        while not mailbox.stopped:
            wait_s = COMPILING_WAIT_S if engine.compiling else ROOM_WAIT_S if engine.waiting_for_room else IDLE_WAIT_S
            messages = mailbox.receive(engine.gather_s() if engine.busy else wait_s)
            for client, commands in messages:
                self._take(client, commands)
            self._end_leases()  # not behind the step, during which nothing is heard however long it takes
            engine.advance()
            engine.publish(0)
            if engine.busy and engine.gather_s() == 0:
                engine.step()
            self._answer_drains()

    def _take(self, client: int, commands: list[Command]) -> None:
        self._heard[client] = self._engine.clock.now()
        plain: list[Command] = []
        for command in commands:
            if isinstance(command, Hello):
                self._reply(client, self._welcome(command))
            elif isinstance(command, Ping):
                self._reply(client, Stats(stats=self._engine.stats()))
            elif isinstance(command, ListSessions):
                self._reply(client, self._engine.sessions(command))
            elif isinstance(command, Drain):
                self._engine.drain()
                self._draining.add(client)
            else:
                plain.append(command)
        if plain:
            self._engine.submit(client, plain)

    def _welcome(self, hello: Hello) -> Event:
        if hello.version != VERSION:
            message = f"the client speaks version {hello.version}, this engine {VERSION}: run the same release of both"
            return Failed.of(0, WeftError(message))
        return Welcome(info=self._engine.info)

    def _reply(self, client: int, event: Event) -> None:
        self._mailbox.send(client, Envelope(0, [event]))

    def _end_leases(self) -> None:
        now = self._engine.clock.now()
        for client in [c for c, heard in self._heard.items() if now - heard > self._lease_s]:
            del self._heard[client]
            self._draining.discard(client)
            self._engine.drop_client(client)

    def _answer_drains(self) -> None:
        if self._draining and self._engine.is_empty:
            for client in self._draining:
                self._reply(client, Drained())
            self._draining.clear()
