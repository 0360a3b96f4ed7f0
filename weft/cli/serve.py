"""`weft serve`: an OpenAI-compatible server, with an engine process for each model."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from weft.abi.errors import ConfigError
from weft.cli.loading import loading_progress
from weft.cli.options import ENGINE_KEYS, SERVER_KEYS, takes_settings
from weft.cli.settings import Settings, as_toml, with_setting
from weft.config import Config

ARGUMENT = "argument MODEL"

EXAMPLES = """Examples:

  weft serve                                   weft-tiny, on 127.0.0.1:8000

  weft serve Qwen/Qwen3-0.6B --port 9000       from the hub

  weft serve ./llama --served-model-name llama --max-context 8192 --kv-cache-size 4GiB

  WEFT_SERVER_API_KEYS=alice=secret weft serve --host 0.0.0.0

  weft serve --config weft.toml --print-config
"""


def register(app: typer.Typer) -> None:
    """Add the command `serve` to the application."""
    app.command("serve", epilog=EXAMPLES)(serve)


@takes_settings(*ENGINE_KEYS, *SERVER_KEYS)
def serve(
    settings: Settings,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="weft-tiny, a directory, a GGUF file, or a hub id; each model has its own engine.",
            show_default=False,
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective settings and their sources, and exit.")
    ] = False,
) -> None:
    """Serve models over HTTP, with OpenAI's API.

    Settings come from defaults, a TOML file, WEFT_… variables and flags, in ascending precedence.

    The first Ctrl-C (or SIGTERM) lets running requests finish, the second interrupts them, the third exits at once.
    """
    each = per_model(settings, models or [])
    if print_config:
        typer.echo("\n".join(map(as_toml, each)), nl=False)
        return
    run([one.config for one in each])


def per_model(settings: Settings, models: list[str]) -> list[Settings]:
    """Return the settings of each model's engine; several models divide memory and threads among them.

    Raises `ConfigError` for models or names that are not distinct, and for replicas on a CUDA device.
    """
    replicas = settings.config.server.replicas
    if len(models) == 1:
        settings = with_setting(settings, "engine.model", models[0], ARGUMENT)
    if len(models) < 2:
        return [settings if replicas == 1 else _shared(settings, replicas)]
    if len(set(models)) != len(models):
        raise ConfigError("a model is given twice; use --served-model-name for several names of one model")
    names = settings.config.server.served_model_name
    if names and len(names) != len(models):
        raise ConfigError(
            f"{len(models)} models and {len(names)} served model names; give one name per model, in order, or none"
        )
    settings = _shared(settings, len(models) * replicas)
    return [
        with_setting(
            with_setting(settings, "engine.model", model, ARGUMENT), "server.served_model_name", [name], ARGUMENT
        )
        for model, name in zip(models, names or models, strict=True)
    ]


def _shared(settings: Settings, count: int) -> Settings:
    """The settings of one of `count` engines that divide memory and threads. Raises `ConfigError`."""
    from weft.worker.build import choose_device
    from weft.worker.memory import usable_cores
    from weft.worker.sizing import CPU_FRACTION, GPU_FRACTION, kernel_threads

    engine = settings.config.engine
    is_cuda = choose_device(engine).type == "cuda"
    if is_cuda and settings.config.server.replicas > 1:
        raise ConfigError("replicas share no CUDA device, and are not assigned to several; start a server for each")
    default = GPU_FRACTION if is_cuda else CPU_FRACTION
    source = f"divided among {count} engines"
    if engine.memory_fraction is None and engine.kv_cache_bytes is None and engine.num_pages is None:
        settings = with_setting(settings, "engine.memory_fraction", default / count, source)
    if engine.threads is None:
        threads = max(1, kernel_threads(None, usable_cores()) // count)
        settings = with_setting(settings, "engine.threads", threads, source)
    return settings


def run(configs: list[Config]) -> None:
    """Serve until a signal. Raises `WeftError` if an engine cannot start."""
    from weft.server.start import serve as serve_models

    _check_address(configs[0].server.host, configs[0].server.port)
    serve_models(configs, lambda model: loading_progress(model, alone=len(configs) == 1))


def _check_address(host: str, port: int) -> None:
    """Check that the address is free before models are loaded. Raises `ConfigError`."""
    try:
        [family, kind, _, _, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"the server cannot listen on {host} port {port}: {reason}; see --host and --port") from error
