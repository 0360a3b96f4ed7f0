"""`weft workflow list | show | results | set | resume | cancel`: runs of workflows on a server."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.abi.errors import WeftError
from weft.cli.programs import print_lines, print_table
from weft.cli.run_values import ApiKey, Url, value_of
from weft.core.wording import plural

if TYPE_CHECKING:
    from weft.client import Client, Run

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, such as `weft workflow list` shows.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write a line of JSON for each run.")]
PREFIX = "wrun-"
"""Of the ids of workflows' runs."""


def list_runs(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List your runs of workflows on a server, newest first."""
    with client_of(url, api_key) as client:
        found = [run for run in client.runs.list() if run.workflow is not None]
    if as_json:
        print_lines(found)
        return
    print_table(
        ("RUN", "WORKFLOW", "STATUS", "ROWS", "FAILED", "CALLS", "STARTED"),
        [
            (
                run.id,
                f"{run.program or 'unnamed'}@{run.hash[:8]}",
                run.status if run.error is None else f"{run.status}: {run.error.kind}",
                f"{progress['done']}/{progress['rows']}",
                str(progress["failed"]),
                str(progress["calls"]["calls"]),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created)),
            )
            for run in found
            if (progress := run.workflow) is not None
        ],
    )


def show_run(run_id: str, url: str | None, api_key: str | None, *, as_json: bool) -> None:
    """Write how far a run on a server is, and what it waits for."""
    with client_of(url, api_key) as client:
        run = client.runs.get(run_id)
    if as_json:
        print_lines([run])
        return
    for line in _lines(run, url):
        typer.echo(line)


def explain_served(run_id: str, form: str, url: str | None, api_key: str | None) -> None:
    """Write what a run on a server was expected to do, and what it did."""
    with client_of(url, api_key) as client:
        made = client.workflows.explain_run(run_id, form)
    if form == "json":
        typer.echo(json.dumps(made, indent=2, ensure_ascii=False))
    else:
        typer.echo(made, nl=form == "mermaid")


def results(
    run_id: RunId,
    url: Url = None,
    api_key: ApiKey = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Write further results until the run has ended.")
    ] = False,
) -> None:
    """Write the results of a run on a server, a line of JSON for each row, in the order in which rows ended."""
    with client_of(url, api_key) as client:
        if follow:
            for event in client.workflows.events(run_id):
                if event.row is not None:
                    _write(event.row)
            return
        after, has_more = 0, True
        while has_more:
            page = client.workflows.results(run_id, after, 1000)
            for row in page.data:
                _write(row)
            after, has_more = page.last, page.has_more


def set_value(
    variable: Annotated[
        str, typer.Argument(metavar="VARIABLE", help="Its id, such as `weft workflow show RUN` lists.")
    ],
    value: Annotated[
        str,
        typer.Argument(
            metavar="VALUE", help="JSON if it parses, otherwise a text. Write -- before one that begins with -."
        ),
    ],
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Give a run on a server a value that it waits for, once.

    `weft workflow run --url` and `weft workflow show RUN` name the variables of nodes `external`. A value that does not
    follow the schema of its node is refused, and the run goes on waiting.
    """
    from weft.client import ServerError

    given = value_of(value)
    with client_of(url, api_key) as client:
        try:
            client.workflows.set_variable(variable, given)
        except ServerError as error:
            if error.param != "value" or isinstance(given, str | list | dict):
                raise
            text = shlex.quote(json.dumps(value))
            raise WeftError(f"{error.message} VALUE is JSON if it parses: for a text, write {text}.") from error
    typer.echo(f"{variable} set")


def resume(run_id: RunId, url: Url = None, api_key: ApiKey = None) -> None:
    """Go on with a run on a server that failed or was cancelled.

    Runs of a server that was killed go on by themselves when it is started again.
    """
    with client_of(url, api_key) as client:
        typer.echo(f"{run_id} {client.workflows.resume(run_id).status}")


def cancel(run_id: RunId, url: Url = None, api_key: ApiKey = None) -> None:
    """Cancel a run on a server and write its status; its results stay, and it can be resumed."""
    with client_of(url, api_key) as client:
        typer.echo(f"{run_id} {client.runs.cancel(run_id).status}")


def client_of(url: str | None, api_key: str | None) -> Client:
    """The client of a server."""
    from weft.client import Client
    from weft.client.protocol import DEFAULT_URL

    return Client(url or DEFAULT_URL, api_key=api_key)


def _write(row: Any) -> None:
    error = {} if row.error is None else {"error": row.error}
    typer.echo(json.dumps({"row": row.row, "outputs": row.outputs, **error}, ensure_ascii=False))


def server_command(words: str, url: str | None) -> str:
    """The command line of `weft workflow` with these words, for the server at this address."""
    from weft.client.protocol import DEFAULT_URL

    return f"weft workflow {words}" + (f" --url {shlex.quote(url)}" if url and url != DEFAULT_URL else "")


def _lines(run: Run, url: str | None) -> list[str]:
    progress: dict[str, Any] = run.workflow or {}
    lines = [
        f"run: {run.id} of {run.program or 'unnamed'}@{run.hash[:12]}",
        f"status: {run.status}" + (f": {run.error.message}" if run.error is not None else ""),
        f"rows: {progress['done']:,} of {progress['rows']:,}, {progress['failed']:,} failed",
        *(f"  {name}: {_told(calls)}" for name, calls in progress["by_node"].items()),
        f"calls: {_told(progress['calls'])}",
    ]
    waits = progress["waits_for"]
    lines += (f"waits for: {wait['id']} (row {wait['row']}, {wait['node']})" for wait in waits)
    more = progress["num_waits"] - len(waits)
    lines += [f"and {plural(more, 'more value')}"] if more else []
    has_external = any(wait.get("function") is None for wait in waits)
    return lines + ([f"set a value: {server_command('set VARIABLE VALUE', url)}"] if has_external else [])


def _told(calls: dict[str, int]) -> str:
    cached = f", {plural(calls['cached_calls'], 'answer')} from the cache" if calls["cached_calls"] else ""
    merged = f", {calls['merged_calls']:,} more merged" if calls["merged_calls"] else ""
    return (
        f"{plural(calls['calls'], 'call')}{merged}{cached}; {plural(calls['prompt_tokens'], 'prompt token')}, "
        f"{calls['cached_tokens']:,} of them cached, {plural(calls['output_tokens'], 'output token')}"
    )
