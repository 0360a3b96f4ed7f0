"""The group `weft bench`: its commands, a module each."""

from __future__ import annotations

import typer

from weft.cli.bench import latency, multi_turn, serve, shared_prefix, throughput


def register(app: typer.Typer) -> None:
    """Add the group `bench` with all its commands to `app`."""
    group = typer.Typer(no_args_is_help=True, help="Measure how fast this machine, or a server, runs a model.")
    for command in (throughput, latency, serve, multi_turn, shared_prefix):
        command.register(group)
    app.add_typer(group, name="bench")
