"""The flags of settings: one table, from which each command that starts an engine takes its flags.

A command decorated with `takes_settings` receives the merged `Settings` as its argument `settings`; this module adds
the flags to its signature, which is what typer reads, and hands their values to `weft.cli.settings`.
"""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from weft.cli import settings as merge

PANELS = {"engine": "Engine", "server": "Server", "workflows": "Runs of workflows"}


class Flag(NamedTuple):
    """A setting's flag on the command line."""

    names: tuple[str, ...]
    """The first one is used in messages."""
    kind: Any
    help: str
    metavar: str | None = None


FLAGS: Mapping[str, Flag] = {
    "engine.revision": Flag(("--revision",), str, "Branch, tag or commit of a hub id."),
    "engine.offline": Flag(("--offline/--no-offline",), bool, "Use only models in the hub cache."),
    "engine.generation_config": Flag(
        ("--generation-config",),
        str,
        "Sampling defaults: the checkpoint's (auto) or the API's (none). (auto)",
        "auto|none",
    ),
    "engine.dtype": Flag(("--dtype",), str, "Data type of weights and KV.", "auto|float32|bfloat16|float16|float64"),
    "engine.quantization": Flag(("--quantization",), str, "Quantize the weights of the layers. (none)", "int8|int4"),
    "engine.quantized_blocks": Flag(
        ("--quantized-blocks",),
        str,
        "Compute on quantized blocks and matrices of 4 bits where kernels can (auto), or expand them. (auto)",
        "auto|expand",
    ),
    "engine.device": Flag(("--device",), str, "Device that the model runs on.", "auto|cpu|cuda"),
    "engine.max_context": Flag(
        ("--max-context", "--max-model-len"), int, "Longest sequence, prompt and output, in tokens."
    ),
    "engine.memory_fraction": Flag(
        ("--memory-fraction",),
        float,
        "Share of the memory that is free after loading, for KV pages. (0.9 on a GPU, 0.3 on a CPU)",
    ),
    "engine.kv_cache_bytes": Flag(
        ("--kv-cache-size",), str, "Memory for KV pages, such as 2GiB, instead of --memory-fraction.", "SIZE"
    ),
    "engine.num_pages": Flag(("--num-pages",), int, "Number of KV pages, instead of --kv-cache-size."),
    "engine.host_kv_bytes": Flag(
        ("--host-kv-size",),
        str,
        "Host memory for KV pages that leave the device, such as 4GiB; 0: none. (none on a CPU, 0.2 of the free memory "
        "with a GPU)",
        "SIZE",
    ),
    "engine.host_link_gbs": Flag(
        ("--host-link",), float, "Slow copies between device and host pages down to this rate, on a CPU.", "GB/S"
    ),
    "engine.max_running": Flag(("--max-running",), int, "Maximum number of sequences in one step. (256)"),
    "engine.max_step_tokens": Flag(
        ("--max-step-tokens",), int, "Maximum number of tokens in one step. (512 on a CPU, 8192 on a GPU)"
    ),
    "engine.latency_factor": Flag(
        ("--latency-factor",), float, "How much longer other work may make a step with latency requests. (1.5)"
    ),
    "engine.min_share": Flag(("--min-share",), float, "Share of the device's time that other work always gets. (0.1)"),
    "engine.performance_mode": Flag(
        ("--performance-mode",), str, "interactivity: short steps; throughput: longer steps on a CPU. (interactivity)"
    ),
    "engine.intercept_policy": Flag(
        ("--intercept-policy",),
        str,
        "Whose KV goes first when pages are needed: min_waste, lru, or another policy. (min_waste)",
        "NAME",
    ),
    "engine.prefix_cache": Flag(("--prefix-cache/--no-prefix-cache",), bool, "Reuse the KV of common prefixes. (on)"),
    "engine.threads": Flag(("--threads",), int, "CPU threads of kernels. (depends on the number of cores)"),
    "server.served_model_name": Flag(
        ("--served-model-name",), list[str], "Name that clients use; repeat for several. (the model as given)"
    ),
    "server.host": Flag(("--host",), str, "Address to listen on. (127.0.0.1)"),
    "server.port": Flag(("--port",), int, "Port to listen on. (8000)"),
    "server.api_keys": Flag(
        ("--api-key",),
        list[str],
        "KEY or NAME=KEY that clients must send; repeat for several. Other users of the machine can see flags: "
        "prefer WEFT_SERVER_API_KEYS or the configuration file.",
    ),
    "server.ssl_certfile": Flag(("--ssl-certfile",), str, "Certificate for HTTPS.", "FILE"),
    "server.ssl_keyfile": Flag(("--ssl-keyfile",), str, "Private key of the certificate.", "FILE"),
    "server.cors_origins": Flag(
        ("--cors-origin",), list[str], "Origin whose pages may call the server; repeat for several."
    ),
    "server.allowed_hosts": Flag(
        ("--allowed-host",),
        list[str],
        "Permitted Host besides local ones; repeat for several, *.NAME for a domain, * for any. (only local ones "
        "where the server listens on loopback and asks for no key)",
    ),
    "server.stream_keep_alive_s": Flag(
        ("--stream-keep-alive",),
        float,
        "Seconds without events after which a stream gets a comment line; 0: never. (15)",
    ),
    "server.tool_call_parser": Flag(
        ("--tool-call-parser",),
        str,
        "Format of the model's tool calls. (detected from its chat template)",
        "auto|hermes|llama3_json|mistral|none",
    ),
    "server.reasoning_parser": Flag(
        ("--reasoning-parser",),
        str,
        "Format of the model's reasoning. (detected from its chat template)",
        "auto|think|none",
    ),
    "server.log_level": Flag(
        ("--log-level",), str, "Minimum level of log messages. (info)", "debug|info|warning|error"
    ),
    "server.log_format": Flag(("--log-format",), str, "Format of the log. (text)", "text|json"),
    "server.replicas": Flag(("--replicas",), int, "Engines of each model, among which requests are routed. (1)"),
    "server.trace": Flag(("--trace/--no-trace",), bool, "Record the events of each request, for /v1/traces."),
    "workflows.planning": Flag(("--plan/--no-plan",), bool, "Plan runs whose requests do not say whether. (on)"),
    "workflows.pinned_part": Flag(
        ("--pinned-part",),
        float,
        "Part of an engine's KV pages that plans keep for one user, unless a run says. (0.25)",
    ),
    "workflows.objective": Flag(
        ("--run-objective",),
        str,
        "What outputs of runs are wanted for, unless a run says. (throughput)",
        "latency|ttft|throughput|batch",
    ),
}
"""By `section.name`. Settings without a flag are set in the file or the environment."""

ENGINE_KEYS = tuple(key for key in FLAGS if key.startswith("engine."))
SERVER_KEYS = tuple(key for key in FLAGS if not key.startswith("engine."))

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="WEFT_CONFIG", metavar="FILE", help="TOML file with settings.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="weft-tiny, a directory, a GGUF file, or a hub id.", show_default=False),
]
NamedModel = Annotated[
    str | None,
    typer.Option("--model", "-m", help="The same as MODEL: weft-tiny, a directory, a GGUF file, or a hub id."),
]


def takes_settings(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `--config` and the flags of these settings to a command, and give it the merged `settings` instead.

    An argument `model` of the command counts as `engine.model`, where it is given.
    """
    parameters = {_name(key): key for key in keys}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        hints = typing.get_type_hints(command, include_extras=True)
        annotations = {name: hints[name] for name in own if name != "settings"}
        annotations |= {"config": ConfigFile} | {name: _annotation(key) for name, key in parameters.items()}

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            flags = {key: values.pop(name) for name, key in parameters.items()}
            given = {key: (_typed(key, value), value) for key, value in flags.items() if _is_given(value)}
            if isinstance(values.get("model"), str):
                given["engine.model"] = ("MODEL", values["model"])
            settings = merge.load(file=values.pop("config"), environment=os.environ, flags=given)
            command(settings=settings, **values)

        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=own[name].default if name in own else None,
                    annotation=annotation,
                )
                for name, annotation in annotations.items()
            ]
        )
        wrapper.__annotations__ = annotations
        return wrapper

    return decorate


def _name(key: str) -> str:
    return key.replace(".", "_")


def _typed(key: str, value: Any) -> str:
    """The flag's name as it was typed."""
    yes, _, no = FLAGS[key].names[0].partition("/")
    return no if value is False else yes


def _is_given(value: Any) -> bool:
    return value is not None and value != []


def _annotation(key: str) -> Any:
    flag = FLAGS[key]
    panel = PANELS[key.partition(".")[0]]
    option = typer.Option(*flag.names, help=flag.help, metavar=flag.metavar, rich_help_panel=panel, show_default=False)
    return Annotated[flag.kind | None, option]
