"""Flags that commands of `weft bench` share, and their evaluation: model, server, targets, fields."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from weft.cli.bench.client import TIMEOUT_S, Endpoint, Target
from weft.cli.bench.lengths import KINDS, Lengths, parse_lengths
from weft.cli.bench.measure import Targets, parse_targets
from weft.cli.random_weights import SHAPES
from weft.cli.settings import Settings, with_setting

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Make a flag parser for typer: a `ValueError` of `parse` becomes a usage error with its message."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return read


Runs = Annotated[int, typer.Option("--runs", min=1, help="Measured runs; the median and the extremes are reported.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of prompts and arrivals; run i uses SEED + i.")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, help="Tokens per prompt, including the shared prefix.")]
OutputLen = Annotated[int, typer.Option("--output-len", min=1, help="Tokens per answer; end-of-sequence is ignored.")]
InputLengths = Annotated[
    Lengths,
    typer.Option(
        "--input-len",
        parser=parsed(parse_lengths),
        metavar="LENGTHS",
        help=f"Tokens per prompt, including the shared prefix: {KINDS}.",
        show_default=False,
    ),
]
OutputLengths = Annotated[
    Lengths,
    typer.Option(
        "--output-len",
        parser=parsed(parse_lengths),
        metavar="LENGTHS",
        help="Tokens per answer, in the same form.",
        show_default=False,
    ),
]
SharedPrefixLen = Annotated[
    int, typer.Option("--shared-prefix-len", min=0, help="Length of the prefix that all prompts of a run share.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all results, with machine and versions, to a file.", metavar="FILE")
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        "--random-weights",
        metavar="|".join(SHAPES),
        help="Use random weights in this shape instead of MODEL; the checkpoint is written once.",
        show_default=False,
    ),
]

SERVER_PANEL, LOAD_PANEL = "Server to measure", "Load"
BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        "--url",
        envvar="WEFT_URL",
        help="A running server with OpenAI's API. (a server is started)",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Name of the model on the server, or the model to start. (the first one listed)",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="WEFT_API_KEY",
        help="API key for the server.",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
EndpointFlag = Annotated[
    Endpoint,
    typer.Option(
        "--endpoint",
        help="Send token ids to /v1/completions, or words to /v1/chat/completions.",
        rich_help_panel=SERVER_PANEL,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Request answers of an exact length, which some servers do not support.",
        rich_help_panel=SERVER_PANEL,
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        "--extra-body",
        metavar="JSON",
        help="Additional fields of every request, as JSON.",
        rich_help_panel=SERVER_PANEL,
        show_default=False,
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", min=0.001, help="Time limit of one request in seconds.", rich_help_panel=SERVER_PANEL),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        "--max-concurrency",
        min=1,
        help="Maximum number of concurrent requests; others wait in the client.",
        rich_help_panel=LOAD_PANEL,
        show_default=False,
    ),
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        "--goodput",
        metavar="NAME:MS",
        help="Latency target for goodput: ttft:MS, tpot:MS or e2e:MS; repeatable.",
        rich_help_panel=LOAD_PANEL,
        show_default=False,
    ),
]
DEFAULT_TIMEOUT_S = TIMEOUT_S


def with_model(settings: Settings, random_shape: str | None) -> Settings:
    """Return the settings, with a checkpoint of random weights as the model if a shape is given."""
    if random_shape is None:
        return settings
    if "engine.model" in settings.given and settings.given["engine.model"].source == "flag MODEL":
        raise typer.BadParameter("give either MODEL or --random-weights")
    from weft.cli.random_weights import random_weights

    directory = random_weights(random_shape, lambda line: typer.echo(line, err=True))
    return with_setting(settings, "engine.model", str(directory), "flag --random-weights")


def engine_subject(settings: Settings) -> dict[str, Any]:
    """Return the engine settings that differ from the defaults, for the report."""
    engine = settings.config.engine
    return {
        **({"quantization": engine.quantization} if engine.quantization is not None else {}),
        **({} if engine.quantized_blocks == "auto" else {"quantized blocks": engine.quantized_blocks}),
        **({} if engine.prefix_cache else {"prefix cache": "off"}),
    }


@contextlib.contextmanager
def measured_server(settings: Settings, asked: Target, random_weights: str | None) -> Iterator[Target]:
    """The server at `asked.url`, or a server started with these settings for the duration of the context."""
    if asked.url is not None:
        if random_weights is not None:
            raise typer.BadParameter("--random-weights needs a server that the benchmark starts; omit it or --base-url")
        yield asked
        return
    from weft.cli.bench.server import own_server

    if asked.model is not None:
        settings = with_setting(settings, "engine.model", asked.model, "flag MODEL")
    with own_server(with_model(settings, random_weights)) as url:
        # It requires no key, and has one model.
        yield asked._replace(url=url, model=None, api_key=None)


def read_slo(texts: list[str] | None) -> Targets:
    """Read the values of `--slo`. Raises `typer.BadParameter`."""
    return parsed(lambda _: parse_targets(texts or []))("")


def read_extra_body(text: str | None) -> dict[str, Any]:
    """Read the JSON object of `--extra-body`. Raises `typer.BadParameter`."""
    try:
        fields = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise typer.BadParameter("--extra-body must be an object, such as '{\"seed\": 1}'")
    return fields


def text_of_random_weights(shape: str | None) -> dict[str, Any]:
    """Return request fields for a model with random weights: ids, because most of its tokens have no text."""
    return {} if shape is None else {"return_token_ids": True}


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[object], None]]:
    """A bar on standard error, if that is a terminal; yields a function that advances it by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar: Progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=2,
    )
    if not bar.console.is_terminal:
        yield lambda outcome: None
        return
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda outcome: bar.advance(task)
