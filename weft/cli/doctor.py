"""`weft doctor`: reports the machine's resources, what an engine would use, and what does not work.

Owns the order and layout of the report; `probe` examines the machine for each report.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.options import ENGINE_KEYS, Model, takes_settings
from weft.cli.settings import Settings

if TYPE_CHECKING:
    from weft.cli.probe import MachineReport

EXAMPLES = """Examples:

  weft doctor                          this machine, and weft-tiny on it

  weft doctor Qwen/Qwen3-0.6B --dtype bfloat16 --kv-cache-size 2GiB

  weft doctor --json
"""


def register(app: typer.Typer) -> None:
    """Add the command `doctor` to the application."""
    app.command("doctor", epilog=EXAMPLES)(doctor)


@takes_settings(*ENGINE_KEYS)
def doctor(
    settings: Settings,
    model: Model = None,
    as_json: bool = typer.Option(False, "--json", help="Write JSON."),
) -> None:
    """Show the machine's resources and how a model would run on it.

    Nothing is downloaded and no weights are loaded. The exit status is 1 if a required component does not work.
    """
    from weft.cli import probe

    report = probe.probe(settings.config.engine)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(1)


def _print(report: MachineReport) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for title, rows in report.sections():
        console.print(f"[bold]{title}[/bold]")
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            console.print(f"  {name:{width}}  {_text(value)}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    for problem in report.problems:
        console.print(f"PROBLEM: {problem}", markup=False)
    if not report.problems:
        console.print("All required components work.")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not known" if value is None else str(value)
