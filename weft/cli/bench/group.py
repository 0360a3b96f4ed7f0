"""The group `weft bench`; each command is a module."""

from __future__ import annotations

import typer

from weft.cli.bench import latency, multi_turn, serve, shared_prefix, throughput


def register(app: typer.Typer) -> None:
    """Add the group `bench` with all its commands to `app`."""
    group = typer.Typer(no_args_is_help=True, help="Measure the speed of a model on this machine, or of a server.")
    for command in (throughput, latency, serve, multi_turn, shared_prefix):
        command.register(group)
    app.add_typer(group, name="bench")
