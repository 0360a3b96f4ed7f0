"""The flags of `weft workflow run` that say how a run is planned, and what its outputs are wanted for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Planning"

Planned = Annotated[
    bool | None,
    typer.Option(
        "--plan/--no-plan",
        help="Run calls in the order of a plan, or row by row; results are the same. (on; with --url the server's)",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
PinnedPart = Annotated[
    float | None,
    typer.Option(
        "--pinned-part",
        help="Part of the KV pages that the plan may keep for shared prefixes, at most 0.5. (0.25; with --url the "
        "server's)",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Wanted = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="[NAME=]OBJECTIVE",
        help="What the outputs are wanted for, or one of them, repeatable: latency, ttft, throughput, deadline, batch. "
        "(throughput; with --url the server's)",
        rich_help_panel=_PANEL,
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="SECONDS",
        help="With objective deadline: when the outputs should be there, from the beginning of the run.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def planned_options(
    plan: bool | None, pinned_part: float | None, objectives: list[str] | None, deadline_s: float | None
) -> dict[str, Any]:
    """The options of a run that were given, under the names of `flow.run` and of the HTTP API. Raises
    `typer.BadParameter`."""
    if plan is False and pinned_part is not None:
        raise typer.BadParameter("--no-plan pins nothing: give it or --pinned-part")
    options: dict[str, Any] = {} if plan is None else {"planning": plan}
    if pinned_part is not None:
        options["planning"] = {"pinned_part": pinned_part}
    if deadline_s is not None:
        options["deadline_s"] = deadline_s
    if objectives:
        options["objective"] = _objective(objectives)
    return options


def _objective(given: list[str]) -> str | dict[str, str]:
    named = [text.rpartition("=") for text in given]
    if len(given) == 1 and not named[0][1]:
        return given[0]
    if not all(name for name, _, _ in named):
        raise typer.BadParameter("give one --objective for all outputs, or NAME=OBJECTIVE for each")
    if len({name for name, _, _ in named}) < len(named):
        raise typer.BadParameter("an output has two objectives: give one --objective NAME=OBJECTIVE for each")
    return {name: objective for name, _, objective in named}
