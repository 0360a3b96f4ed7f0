"""The flags of sampling and stopping that `chat` and `generate` share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", help="Tokens of the answer. (as many as the context leaves)", rich_help_panel=_PANEL),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0: always the most probable token. (1)", rich_help_panel=_PANEL),
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling. (1)", rich_help_panel=_PANEL)]
TopK = Annotated[int | None, typer.Option("--top-k", help="0: no limit. (0)", rich_help_panel=_PANEL)]
MinP = Annotated[float | None, typer.Option("--min-p", help="Relative to the best token. (0)", rich_help_panel=_PANEL)]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Draws depend on it and the request alone.", rich_help_panel=_PANEL)
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the answer; repeat for several.", rich_help_panel=_PANEL),
]


def given(**flags: Any) -> dict[str, Any]:
    """The options that were given, under the names that both `weft.LLM` and the HTTP API have for them."""
    return {name: value for name, value in flags.items() if value is not None and value != []}
