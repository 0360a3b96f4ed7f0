"""The group `weft bench` and its flags that are the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.random_weights import SHAPES
from weft.cli.settings import Settings, with_setting

Runs = Annotated[int, typer.Option("--runs", min=1, help="Measured runs; the median and the extremes are reported.")]
Seed = Annotated[int, typer.Option("--seed", help="Of prompts and arrivals; run i uses SEED + i.")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, help="Tokens of each prompt, shared prefix included.")]
OutputLen = Annotated[int, typer.Option("--output-len", min=1, help="Tokens of each answer, whatever comes.")]
SharedPrefixLen = Annotated[
    int, typer.Option("--shared-prefix-len", min=0, help="First tokens that all prompts of a run share.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write everything, with machine and versions, to a file.", metavar="FILE")
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        "--random-weights",
        metavar="|".join(SHAPES),
        help="Use a checkpoint of this shape with random weights, made the first time, instead of MODEL.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    from weft.cli.bench import latency, serve, throughput

    group = typer.Typer(no_args_is_help=True, help="Measure how fast this machine, or a server, runs a model.")
    throughput.register(group)
    latency.register(group)
    serve.register(group)
    app.add_typer(group, name="bench")


def with_model(settings: Settings, random_shape: str | None) -> Settings:
    """The settings, with random weights for the model where they are asked for."""
    if random_shape is None:
        return settings
    if "engine.model" in settings.given and settings.given["engine.model"].source == "flag MODEL":
        raise typer.BadParameter("MODEL and --random-weights: give one of them")
    from weft.cli.random_weights import random_weights

    directory = random_weights(random_shape, lambda line: typer.echo(line, err=True))
    return with_setting(settings, "engine.model", str(directory), "flag --random-weights")
