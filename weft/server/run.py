"""`serve`: the process of the HTTP server, from its configuration to its last request.

Owns signals and the order of the shutdown: after SIGTERM or SIGINT, `/ready` and new requests get 503 while the port
stays open, running requests have `drain_s` to finish and are then interrupted, and engines are closed. A second signal
skips the wait; a third one closes connections without their last bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from weft.abi.errors import ConfigError
from weft.config import Config, EngineConfig, ServerConfig
from weft.endpoints.models import ServedModel
from weft.engine.supervisor import ProcessEngine, Progress
from weft.hub import file_stamp, find_model
from weft.server.app import App, create_app
from weft.server.connections import Connections, StalledConnections, max_connections
from weft.server.logs import configure_logging
from weft.server.programs import data_folder, process_programs
from weft.server.protocol import HttpConfig
from weft.server.state import Service
from weft.store.database import Database
from weft.tokenizers.load import load_tokenizer
from weft.workflow.service.service import WorkflowService

if TYPE_CHECKING:
    from uvicorn.server import Protocols

ProgressOf = Callable[[str], Progress | None]

logger = logging.getLogger("weft.server")

LOOKS = 4
"""Checks of the unsent bytes of connections per `send_timeout_s`."""
CLOSE_S = 5
"""Seconds that connections have to take their last bytes after the drain."""
REPEATED_SIGNAL_S = 0.5
"""Signals within this time count as one: `timeout` signals its child and then the child's process group."""


def serve(configs: Sequence[Config], progress: ProgressOf | None = None) -> None:
    """Serve one model per configuration until a signal. The first configuration has the server's settings.

    `progress(model)` returns the callback for the progress of loading a model. Raises `ConfigError` or
    `ModelLoadError` if an engine cannot start.
    """
    shared = configs[0].server
    configure_logging(shared)
    check_tls(shared)
    engines = [config.engine for config in configs]
    database = Database(data_folder(configs[0].programs))
    service = Service(
        shared,
        [load_model(config, progress) for config in configs],
        programs=lambda models: process_programs(models, shared, configs[0].programs, engines, database),
        workflows=lambda models: WorkflowService(models, configs[0].workflows, database),
    )
    server = Server(create_app(shared, service), shared)
    server.run()
    if service.failure is not None:
        raise service.failure


def load_model(config: Config, progress: ProgressOf | None = None) -> ServedModel:
    """The engine processes and the tokenizer of a configuration. Raises `ModelLoadError` for a tokenizer's files."""
    engine, server = config.engine, config.server
    tokenizer = load_tokenizer(
        engine.model, engine.revision, engine.offline, generation_config=engine.generation_config == "auto"
    )
    report = progress(engine.model) if progress is not None else None
    processes = [
        ProcessEngine(engine, progress=progress, trace=server.trace, log_level=server.log_level)
        for progress in (report, *[None] * (server.replicas - 1))
    ]
    return ServedModel(
        server.served_model_name or [engine.model],
        processes[0],
        tokenizer,
        root=engine.model,
        stamp=lambda: weights_stamp(engine),
        more_engines=processes[1:],
    )


def weights_stamp(engine: EngineConfig) -> str:
    """What tells the weights of an engine from others. Raises `ModelLoadError` where they are gone."""
    path = find_model(engine.model, engine.revision, files=(), offline=True)
    return f"{file_stamp(path)} {engine.quantization}"


def check_tls(config: ServerConfig) -> None:
    """Raise `ConfigError` for unusable certificate files."""
    cert, key = config.ssl_certfile, config.ssl_keyfile
    if cert is None and key is None:
        return
    if cert is None:
        raise ConfigError("ssl_keyfile is set without ssl_certfile; set both, or neither to serve plain HTTP")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile {cert} and ssl_keyfile {key} cannot be used: {error}") from error


class Server(uvicorn.Server):
    """uvicorn with the drain. `app` must come from `create_app`."""

    def __init__(self, app: App, config: ServerConfig):
        super().__init__(uvicorn_config(app, config))
        self._service = app.service
        self._service.on_failure = self._stop_now
        self._drain_s = config.drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._signalled_s = -math.inf
        self._send_timeout_s = config.send_timeout_s
        self._stalled: StalledConnections[Protocols] = StalledConnections(config.send_timeout_s)

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
            self._service.interrupt_all()
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
