"""A benchmark's tables on standard output, and its file: figures with the machine, the versions and the command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.bench.measure import Spread, over_runs
from weft.cli.bench.record import command_line, surroundings, write_record

if TYPE_CHECKING:
    from rich.table import Table

Run = Mapping[str, float]
"""Figures of one run, by name; a name ends in its unit, followed by `_mean` or `_p99` for distributions."""
Groups = Mapping[str, Sequence[Run]]
"""Runs by group; a single group has the name ""."""

WIDE = 1000
_DISTRIBUTION = re.compile(r"(\w+)_(mean|p\d+)")


def report(
    name: str,
    groups: Groups,
    subject: Mapping[str, Any],
    file: Path | None,
    *,
    overview: Sequence[str] = (),
    detailed: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print and write the results.

    Every group, or those in `detailed`, has a table. With `overview`, another table compares several groups by these
    figures. `notes` concern the validity of the figures; they go to standard error and into the file.
    """
    summaries = {title: over_runs(runs) for title, runs in groups.items()}
    around = surroundings()
    where = around["machine"]
    typer.echo(f"{name}: " + ", ".join(f"{key} {value}" for key, value in subject.items()))
    typer.echo(f"on {where['cpu']}, {where['usable_cores']} cores, GPUs: {', '.join(where['gpus']) or 'none'}")
    for title, summary in summaries.items():
        if detailed is None or title in detailed:
            _print_group(title, summary, len(groups[title]))
    if overview and len(groups) > 1:
        _print_overview(summaries, overview)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if file is not None:
        content = {
            "benchmark": name,
            "command": command_line(),
            "subject": dict(subject),
            **around,
            "notes": list(notes),
            "summary": {
                title: {key: one._asdict() for key, one in found.items()} for title, found in summaries.items()
            },
            "runs": {title: [dict(run) for run in runs] for title, runs in groups.items()},
        }
        write_record(file, content)


def _print_group(title: str, summary: Mapping[str, Spread], num_runs: int) -> None:
    """A row per distribution, with medians over the runs; other figures with their extremes."""
    from rich.console import Console

    distributions: dict[str, dict[str, Spread]] = {}
    single: dict[str, Spread] = {}
    for name, spread in summary.items():
        if match := _DISTRIBUTION.fullmatch(name):
            distributions.setdefault(match[1], {})[match[2]] = spread
        else:
            single[name] = spread
    if title:
        typer.echo(f"\n{title}")
    if distributions:
        parts = list(dict.fromkeys(part for found in distributions.values() for part in found))
        table = _table("", *parts)
        for name, found in distributions.items():
            table.add_row(name, *(_digits(found[part].median) if part in found else "" for part in parts))
        Console().print(table)
    table = _table("", *(["median", f"least of {num_runs}", "most"] if num_runs > 1 else ["value"]))
    for name, spread in single.items():
        table.add_row(name, *map(_digits, spread if num_runs > 1 else spread[:1]))
    Console().print(table)


def _print_overview(summaries: Mapping[str, Mapping[str, Spread]], names: Sequence[str]) -> None:
    from rich.console import Console

    shown = [name for name in names if any(name in summary for summary in summaries.values())]
    table = _table("median", *shown)
    for title, summary in summaries.items():
        table.add_row(title, *(_digits(summary[name].median) if name in summary else "" for name in shown))
    typer.echo()
    # Full width: a terminal wraps long lines better than a table wraps names.
    Console(width=WIDE).print(table)


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table


def _digits(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"
