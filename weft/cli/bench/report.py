"""A benchmark's table on standard output, and its file: figures with the machine, the versions and the command."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from weft.cli.bench.measure import Spread, over_runs
from weft.cli.files import write_file

Run = Mapping[str, float]
"""Figures of one run, by name; a name ends in its unit."""


def report(name: str, groups: Mapping[str, Sequence[Run]], subject: Mapping[str, Any], file: Path | None) -> None:
    """Print and write what was measured. `groups` are runs by what differed between them (one group: "")."""
    from weft.cli import probe
    from weft.cli.version import versions

    summaries = {title: over_runs(runs) for title, runs in groups.items()}
    where = probe.machine()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    typer.echo(f"{name}: " + ", ".join(f"{key} {value}" for key, value in subject.items()))
    typer.echo(f"on {where['cpu']}, {where['usable_cores']} cores, GPUs: {', '.join(where['gpus']) or 'none'}")
    for title, summary in summaries.items():
        _print(title, summary, len(groups[title]))
    if file is not None:
        content = {
            "benchmark": name,
            "command": command,
            "subject": dict(subject),
            "machine": where,
            "versions": versions(),
            "summary": {
                title: {key: one._asdict() for key, one in found.items()} for title, found in summaries.items()
            },
            "runs": {title: [dict(run) for run in runs] for title, runs in groups.items()},
        }
        write_file(file, json.dumps(content, indent=2) + "\n")


def _print(title: str, summary: Mapping[str, Spread], num_runs: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    table.add_column("figure")
    table.add_column("median" if num_runs > 1 else "value", justify="right")
    if num_runs > 1:
        table.add_column(f"least of {num_runs}", justify="right")
        table.add_column("most", justify="right")
    for name, spread in summary.items():
        shown = spread if num_runs > 1 else spread[:1]
        table.add_row(name, *(_digits(value) for value in shown))
    Console().print(table)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"
