"""`weft programs`: uploads programs to a server, runs them there, and manages their runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.run_values import (
    EXIT_FAILED,
    ApiKey,
    Arg,
    AsJson,
    Limit,
    Network,
    Screen,
    Send,
    Url,
    arguments,
    limits,
    value_of,
)

if TYPE_CHECKING:
    from weft.client import Client, Run

EXAMPLES = """Examples:

  weft programs upload agent.py

  weft programs run agent --arg question='What is the weather in Rome?'

  weft programs run agent --background

  weft programs attach run-0123456789abcdef01234567

  weft programs logs run-0123456789abcdef01234567
"""

Reference = Annotated[str, typer.Argument(metavar="PROGRAM", help="A name, name@hash, or a hash.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]


def register(app: typer.Typer) -> None:
    """Add the group `programs` with all its commands to `app`."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Upload programs to a server, run them, and manage their runs. The server is --url, WEFT_URL, "
        "or http://127.0.0.1:8000. `weft run` runs a file without a server.",
        epilog=EXAMPLES,
        rich_markup_mode="rich",
    )
    for name, command in _COMMANDS.items():
        group.command(name)(command)
    app.add_typer(group, name="programs")


def upload(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Python program, or a Wasm module.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the program. (that of the file)", show_default=False)
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Upload a new version of a program; the name then refers to it."""
    with _client(url, api_key) as client:
        program = client.programs.upload(name or file.stem, file)
    typer.echo(f"{program.name}@{program.hash[:12]}")


def list_programs(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the programs of your tenant, with their latest versions."""
    with _client(url, api_key) as client:
        programs = client.programs.list()
    if as_json:
        print_lines(programs)
        return
    print_table(
        ("NAME", "HASH", "KIND", "BYTES", "VERSIONS", "UPLOADED"),
        [
            (
                program.name,
                program.hash[:12],
                "trusted" if program.trusted else program.kind,
                str(program.size_bytes),
                str(len(program.versions)),
                _when(program.created),
            )
            for program in programs
        ],
    )


def run(
    program: Reference,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGS...]",
            help="Argument of main: JSON if it parses, otherwise a string; several become a list.",
            show_default=False,
        ),
    ] = None,
    arg: Arg = None,
    send: Send = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A served name.", show_default=False)] = None,
    limit: Limit = None,
    network: Network = None,
    background: Annotated[bool, typer.Option("--background", "-b", help="Print the run's id and return.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Run an uploaded program and write its messages and its result. Ctrl-C cancels it."""
    args = arguments(words or [], arg or [])
    options: dict[str, Any] = {"limits": limits(limit or [], network or []), "model": model}
    options["messages"] = [value_of(text) for text in send or []]
    with _client(url, api_key) as client:
        if background:
            typer.echo(client.programs.start(program, args, **options).id)
            return
        with closing(client.programs.stream(program, args, **options)) as events:
            screen = Screen(as_json=as_json, no_arguments=args is None)
            finished = screen.follow(events, log_of=client.runs.logs)
    if not finished:
        raise typer.Exit(EXIT_FAILED)


def attach(run_id: RunId, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Write the messages of a run until it ends; send it each line of standard input as a message.

    Ctrl-C detaches and leaves the run running.
    """
    from weft.cli.attach import attach_to

    with _client(url, api_key) as client:
        finished = attach_to(client, run_id, Screen(as_json=as_json))
    if not finished:
        raise typer.Exit(EXIT_FAILED)


def logs(run_id: RunId, url: Url = None, api_key: ApiKey = None) -> None:
    """Write the log of a run."""
    with _client(url, api_key) as client:
        for line in client.runs.logs(run_id):
            typer.echo(f"{_when(line.at)} {line.level}: {line.text}")


def runs(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List your runs, newest first."""
    with _client(url, api_key) as client:
        found = client.runs.list()
    if as_json:
        print_lines(found)
        return
    print_table(
        ("RUN", "PROGRAM", "STATUS", "STARTED", "SECONDS", "TOKENS"),
        [
            (
                one.id,
                f"{one.program or 'source'}@{one.hash[:8]}",
                one.status if one.error is None else f"{one.status}: {one.error.kind}",
                _when(one.created),
                _seconds(one),
                str(one.usage.get("prompt_tokens", 0) + one.usage.get("generated_tokens", 0)),
            )
            for one in found
        ],
    )


def cancel(run_id: RunId, url: Url = None, api_key: ApiKey = None) -> None:
    """Cancel a run and write its status."""
    with _client(url, api_key) as client:
        typer.echo(f"{run_id} {client.runs.cancel(run_id).status}")


def remove(program: Reference, url: Url = None, api_key: ApiKey = None) -> None:
    """Delete a program with all versions, or one version by name@hash or hash."""
    with _client(url, api_key) as client:
        client.programs.delete(program)


_COMMANDS: dict[str, Any] = {
    "upload": upload,
    "list": list_programs,
    "run": run,
    "attach": attach,
    "logs": logs,
    "runs": runs,
    "cancel": cancel,
    "remove": remove,
}


def _client(url: str | None, api_key: str | None) -> Client:
    from weft.client import Client
    from weft.client.protocol import DEFAULT_URL

    return Client(url or DEFAULT_URL, api_key=api_key)


def print_lines(found: Iterable[Any]) -> None:
    """Write structs as lines of JSON."""
    import msgspec

    for one in found:
        typer.echo(msgspec.json.encode(one).decode())


def print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Write rows of text under their head, in columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def _seconds(run: Run) -> str:
    if run.started is None:
        return "-"
    return f"{(run.finished or time.time()) - run.started:.1f}"
