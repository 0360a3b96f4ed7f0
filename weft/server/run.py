"""The server of a process: what answers requests, from its engines to its last request.

Owns signals and the order of the shutdown: after SIGTERM or SIGINT, `/ready` and new requests get 503 while the port
stays open, running requests have `drain_s` to finish and are then interrupted, and engines are closed. A second signal
skips the wait; a third one closes connections without their last bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from weft.abi.errors import WeftError
from weft.config import Config, EngineConfig, ServerConfig
from weft.endpoints.models import ServedModel
from weft.engine.supervisor import ProcessEngine
from weft.hub import file_stamp, find_model
from weft.server.app import App, create_app
from weft.server.connections import Connections, StalledConnections, max_connections
from weft.server.programs import data_folder, process_programs
from weft.server.protocol import HttpConfig
from weft.server.state import Service
from weft.store.database import Database
from weft.tokenizers.load import load_tokenizer
from weft.workflow.service.service import WorkflowService

if TYPE_CHECKING:
    from uvicorn.server import Protocols

logger = logging.getLogger("weft.server")

LOOKS = 4
"""Checks of the unsent bytes of connections per `send_timeout_s`."""
CLOSE_S = 5
"""Seconds that connections have to take their last bytes after the drain."""
REPEATED_SIGNAL_S = 0.5
"""Signals within this time count as one: `timeout` signals its child and then the child's process group."""

Assemble = Callable[[Sequence[Sequence[ProcessEngine]]], "Server"]
"""Makes the server of models, each with its engines. Call it on the event loop."""


def prepare(configs: Sequence[Config]) -> Assemble:
    """Load the tokenizers of models, on any thread; what is returned makes the server of their engines. Raises
    `ModelLoadError` for a tokenizer's files."""
    tokenizers = [
        load_tokenizer(
            config.engine.model,
            config.engine.revision,
            config.engine.offline,
            generation_config=config.engine.generation_config == "auto",
        )
        for config in configs
    ]
    shared, programs, workflows = configs[0].server, configs[0].programs, configs[0].workflows

    def assemble(engines: Sequence[Sequence[ProcessEngine]]) -> Server:
        database = Database(data_folder(programs))
        served = [
            ServedModel(
                config.server.served_model_name or [config.engine.model],
                first,
                tokenizer,
                root=config.engine.model,
                stamp=partial(weights_stamp, config.engine),
                more_engines=more,
                max_waiting=config.engine.max_waiting,
            )
            for config, tokenizer, (first, *more) in zip(configs, tokenizers, engines, strict=True)
        ]
        settings = [config.engine for config in configs]
        service = Service(
            shared,
            served,
            programs=lambda models: process_programs(models, shared, programs, settings, database),
            workflows=lambda models: WorkflowService(models, workflows, database),
        )
        return Server(create_app(shared, service), shared)

    return assemble


def weights_stamp(engine: EngineConfig) -> str:
    """What tells the weights of an engine, and its defaults of sampling, from others. Raises `ModelLoadError` where
    they are gone."""
    path = find_model(engine.model, engine.revision, files=(), offline=True)
    return f"{file_stamp(path)} {engine.quantization} {engine.quantized_blocks} {engine.generation_config}"


class Server(uvicorn.Server):
    """uvicorn with the drain. `app` must come from `create_app`."""

    def __init__(self, app: App, config: ServerConfig):
        super().__init__(uvicorn_config(app, config))
        self._service = app.service
        self._service.on_failure = self._stop_now
        self._drain_s = config.drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._interruption: asyncio.Task[None] | None = None
        self._signalled_s = -math.inf
        self._send_timeout_s = config.send_timeout_s
        self._stalled: StalledConnections[Protocols] = StalledConnections(config.send_timeout_s)

    @property
    def failure(self) -> WeftError | None:
        """Why it could not serve."""
        return self._service.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port and report the address."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._send_timeout_s:
            self._loop.call_later(self._send_timeout_s / LOOKS, self._look_at_unsent)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the drain, the second interrupts running requests, the third cuts connections."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.on_signal)

    def on_signal(self) -> None:
        """Call `begin_drain`, once for signals in quick succession. Runs on the event loop."""
        now = self._service.timer.now()
        if now - self._signalled_s >= REPEATED_SIGNAL_S:
            self._signalled_s = now
            self.begin_drain()

    def begin_drain(self) -> None:
        """Begin the shutdown; further calls skip its waits. Runs on the event loop."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())
        elif not self.should_exit:
            self._interruption = asyncio.create_task(self._service.interrupt_all())
            self.should_exit = True
        else:
            self._cut_connections()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, which have `CLOSE_S` to take their last bytes, then the engines."""
        deadline = asyncio.get_running_loop().call_later(CLOSE_S, self._cut_connections)
        await super().shutdown(sockets)
        deadline.cancel()

    def _look_at_unsent(self) -> None:
        loop = asyncio.get_running_loop()
        self.give_up_stalled(loop.time())
        loop.call_later(self._send_timeout_s / LOOKS, self._look_at_unsent)

    def give_up_stalled(self, now: float) -> None:
        """Drop connections whose clients have taken no bytes for `send_timeout_s`. Called periodically on the event
        loop."""
        transports = {connection: connection.transport for connection in self.server_state.connections}
        unsent = {connection: transport.get_write_buffer_size() for connection, transport in transports.items()}
        overdue = self._stalled.overdue(unsent, now)
        for connection in overdue:
            transports[connection].abort()
        if overdue:
            logger.info("closed %d connections whose clients did not read their answers", len(overdue))

    def _cut_connections(self) -> None:
        """Drop the unsent bytes of connections. Their requests end like those of clients that disconnected."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain_and_exit(self) -> None:
        await self._service.drain(self._drain_s)
        self.should_exit = True

    def _stop_now(self) -> None:
        self.should_exit = True


def uvicorn_config(app: App, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's configuration for the application."""
    return HttpConfig(
        app,
        Connections(max_connections(config.max_connections), config.header_timeout_s),
        host=config.host,
        port=config.port,
        loop="uvloop",
        ws_max_size=config.max_body_bytes,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=2 * CLOSE_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
