"""`weft sessions`: what the sequences of your tenant wait for on a server, and where their KV is."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from weft.cli.programs import print_lines, print_table
from weft.cli.run_values import ApiKey, Url

EXAMPLES = """Examples:

  weft sessions

  weft sessions --limit 1000 --json
"""
HEAD = (
    *("ID", "REQUEST", "MODEL", "STATE", "WAITS FOR", "TOKENS", "DEVICE", "HOST", "GONE", "SECONDS"),
    *("RETURNS IN", "EXPECTED BY"),
)


def register(app: typer.Typer) -> None:
    """Add the command `sessions` to `app`."""
    app.command("sessions", epilog=EXAMPLES)(sessions)


def sessions(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Sessions that are shown.")] = 100,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A served name.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write every session as a line of JSON.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List your sequences that wait on a server, those that wait longest first.

    DEVICE, HOST and GONE are the tokens whose KV is on the device, on the host alone, and given up. EXPECTED BY tells
    what RETURNS IN rests on: an announcement, what was learned from earlier waits, or the elapsed time.
    """
    from weft.client import Client
    from weft.client.protocol import DEFAULT_URL

    with Client(url or DEFAULT_URL, api_key=api_key) as client:
        found = client.sessions(limit=limit, model=model)
    if as_json:
        print_lines(found.data)
    else:
        now = time.time()
        rows = [
            (
                str(one.id),
                one.request_id,
                one.model,
                one.state,
                one.waits_for,
                *(str(count) for count in (one.tokens, one.device_tokens, one.host_tokens, one.gone_tokens)),
                f"{now - one.since:.1f}",
                "-" if one.until is None else f"{one.until - now:.1f}",
                one.expected_by or "-",
            )
            for one in found.data
        ]
        print_table(HEAD, rows)
    if found.left_out:
        typer.echo(f"{found.left_out} more are not shown; see --limit", err=True)
