"""The flags of sampling and stopping that `chat` and `generate` share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", help="Maximum number of tokens of the answer. (what the context leaves)", rich_help_panel=_PANEL
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="Sampling temperature; 0: greedy decoding. (1)", rich_help_panel=_PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Nucleus sampling: keep the most probable tokens with this total probability. (1)",
        rich_help_panel=_PANEL,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Keep the k most probable tokens; 0: all. (0)", rich_help_panel=_PANEL),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Drop tokens less probable than this share of the most probable one. (0)",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Seed of sampling: the same seed and request give the same tokens.",
        rich_help_panel=_PANEL,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Stop string; repeat for several.", rich_help_panel=_PANEL),
]


def given(**flags: Any) -> dict[str, Any]:
    """Return the options that were given, under the names of `weft.LLM` and of the HTTP API."""
    return {name: value for name, value in flags.items() if value is not None and value != []}
