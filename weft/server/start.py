"""`serve`: a server from its configurations to its end.

Engine processes are started first. While they import torch and load their models, this process imports what answers
requests and loads tokenizers, on a thread. `weft.server.run` has the server from then on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from weft.abi.errors import ConfigError
from weft.config import Config, ServerConfig
from weft.engine.supervisor import ProcessEngine, Progress
from weft.loop_thread import ThreadPerCall
from weft.server.api_keys import parse_keys
from weft.server.logs import configure_logging

if TYPE_CHECKING:
    from weft.server.run import Assemble

ProgressOf = Callable[[str], Progress | None]


def serve(configs: Sequence[Config], progress: ProgressOf | None = None) -> None:
    """Serve one model per configuration until a signal. The first configuration has the server's settings.

    `progress(model)` returns the callback for the progress of loading a model. Raises `ConfigError` or
    `ModelLoadError` if an engine cannot start.
    """
    configure_logging(configs[0].server)
    check_tls(configs[0].server)
    parse_keys(configs[0].server.api_keys)  # before an engine loads a model
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(configs, progress))


async def _serve(configs: Sequence[Config], progress: ProgressOf | None) -> None:
    async with AsyncExitStack() as started:
        engines = [_engines(config, progress) for config in configs]
        for engine in (engine for replicas in engines for engine in replicas):
            started.push_async_callback(engine.close)
            engine.start()
        # On a daemon thread: an interrupt does not wait until a tokenizer is loaded, or downloaded.
        assemble = await asyncio.get_running_loop().run_in_executor(ThreadPerCall(), _prepare, configs)
        server = assemble(engines)
        await server.serve()
    if server.failure is not None:
        raise server.failure


def _engines(config: Config, progress: ProgressOf | None) -> list[ProcessEngine]:
    """One engine for each replica. The first reports its progress."""
    engine, server = config.engine, config.server
    report = progress(engine.model) if progress is not None else None
    return [
        ProcessEngine(engine, progress=progress, trace=server.trace, log_level=server.log_level)
        for progress in (report, *[None] * (server.replicas - 1))
    ]


def _prepare(configs: Sequence[Config]) -> Assemble:
    """What takes seconds and needs no event loop. Raises `ModelLoadError` for a tokenizer's files."""
    from weft.server.run import prepare

    return prepare(configs)


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
