"""`ProcessEngine`: an engine in a child process, as an `EngineClient`.

Owns the connection, and what a death means: every open operation fails with `EngineDead`, and a new engine is started
by `weft.children.supervisor`. An engine that cannot load its model the first time is not tried again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec

from weft.abi.errors import EngineDead, WeftError
from weft.children.supervisor import ChildSettings, ChildSupervisor
from weft.config import EngineConfig
from weft.core.wire import Command, EngineInfo, EngineStats, Envelope, Failed, Hello, Loading, Welcome
from weft.engine.connection import Connection
from weft.engine.launch import LaunchArgs
from weft.engine.request_tracker import TrackingClient
from weft.worker.memory import usable_cores
from weft.worker.sizing import kernel_environment, kernel_threads

Progress = Callable[[int, int], None]

_log = logging.getLogger("weft.engine")


class ProcessEngine(TrackingClient):
    """Implements `weft.engine.client.EngineClient`, and `weft.children.supervisor.ChildOwner`. `start` or
    `wait_ready` starts the process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        trace: bool = False,
        log_level: str = "warning",
    ):
        super().__init__(self._deliver)
        self._progress = progress
        settings = ChildSettings(
            name="the engine",
            module="weft.engine.process",
            args=msgspec.json.encode(LaunchArgs(config=config, trace=trace, log_level=log_level)),
            deadline_s=config.progress_deadline_s,
            environment=kernel_environment(kernel_threads(config.threads, usable_cores())) | os.environ,
        )
        self.child = ChildSupervisor(settings, self)
        self._connection: Connection | None = None
        self._started: asyncio.Future[None] | None = None
        """Whether the first engine could load its model."""
        self._refusal: WeftError | None = None
        """Why the latest engine could not load it."""
        self._ping: asyncio.Task[EngineStats] | None = None
        self.on_ready_change: Callable[[bool], None] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self.child.pid

    @property
    def num_restarts(self) -> int:
        """How often a dead engine was replaced."""
        return self.child.num_restarts

    @property
    def address(self) -> str | None:
        """Where the engine listens, for further clients (`weft.engine.attached`); None while it is not ready."""
        return self.child.address if self.ready else None

    def start(self) -> None:
        """Start the process, once. Call it on the event loop. Raises what `ChildSupervisor.start` raises."""
        self._loading()

    async def wait_ready(self) -> EngineInfo:
        """Start the process, and wait until it has loaded its model; after its death, until its successor has.

        Raises what the first loading and `start` raised, and `EngineDead` once the engine is closed.
        """
        await asyncio.shield(self._loading())
        return await self._requests.until_ready()

    async def close(self) -> None:
        """Stop the engine process. Idempotent."""
        await self.child.close()
        self._give_up(EngineDead("the engine was stopped"))

    # ---- of its child

    def connect(self, address: str) -> None:
        """Say hello; the engine answers when it has loaded its model."""
        self._refusal = None
        self._connection = Connection(address, self._receive)
        self._connection.send([Hello()])

    def disconnect(self) -> None:
        """Close the connection to the engine. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ping(self) -> None:
        """Renew the lease. One ping is under way at a time, however long the engine takes to answer it."""
        if self.ready and (self._ping is None or self._ping.done()):
            self._ping = asyncio.create_task(self._requests.stats())
            self._ping.add_done_callback(lambda ping: ping.cancelled() or ping.exception())

    def lost(self, reason: str) -> bool:
        """Fail what is open. Without a first engine there is no second one."""
        if self._started is not None and not self._started.done():
            self._give_up(self._refusal or EngineDead(f"the engine process {reason} before it was ready; see its log"))
            return False
        if self._refusal is not None:
            _log.error("the engine cannot load its model any more: %s", self._refusal.message)
        self._requests.fail(EngineDead(f"the engine {reason}; it is being restarted, try again in a moment"))
        self._announce(False)
        return True

    # ---- inside

    def _loading(self) -> asyncio.Future[None]:
        if self._started is None:
            self.child.start()
            self._started = asyncio.get_running_loop().create_future()
        return self._started

    def _give_up(self, error: WeftError) -> None:
        self._requests.close(error)
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # there may be no task that waits for it

    def _deliver(self, commands: list[Command]) -> None:
        if self._connection is not None:
            self._connection.send(commands)

    def _receive(self, envelope: Envelope) -> None:
        if self.ready:
            self._requests.receive(envelope)
            return
        for event in envelope.events:
            if isinstance(event, Loading) and self._progress is not None:
                self._progress(event.done, event.total)
            elif isinstance(event, Welcome):
                self._begin(event.info)
            elif isinstance(event, Failed):
                self._refusal = event.error.error()

    def _begin(self, info: EngineInfo) -> None:
        self.child.is_ready = True
        self._requests.begin(info)
        self._announce(True)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _announce(self, ready: bool) -> None:
        if self.on_ready_change is not None:
            self.on_ready_change(ready)
