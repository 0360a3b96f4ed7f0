"""`weft run`: a program from a file, on an engine in this process or on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.files import read_file
from weft.cli.options import ENGINE_KEYS, takes_settings
from weft.cli.run_values import EXIT_FAILED, ApiKey, Arg, AsJson, Limit, Network, Screen, Send, arguments, limits
from weft.cli.run_values import value_of as value
from weft.cli.settings import Settings, with_setting

EXAMPLES = """A program is a Python file with a function main:

  from weft.sdk import Context

  async def main(args):

  \u00a0\u00a0\u00a0\u00a0ctx = Context()

  \u00a0\u00a0\u00a0\u00a0ctx.user(args["question"])

  \u00a0\u00a0\u00a0\u00a0return (await ctx.generate(max_tokens=50)).text

Examples:

  weft run agent.py --arg question='Who are you?'

  weft run sum.py -- '[1, 2, 3]'

  weft run agent.py --model Qwen/Qwen3-0.6B --sandbox --limit cpu_s=10 --network api.example.com

  weft run agent.py --url http://127.0.0.1:8000
"""


def register(app: typer.Typer) -> None:
    """Add the command `run` to the application."""
    app.command("run", epilog=EXAMPLES, no_args_is_help=True)(run)


@takes_settings(*ENGINE_KEYS)
def run(
    settings: Settings,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Python program, or a Wasm module.")],
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
    named_model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="weft-tiny, a directory, a GGUF file, or a hub id.", show_default=False),
    ] = None,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Run the program in the sandbox, as a server does.")
    ] = False,
    limit: Limit = None,
    network: Network = None,
    as_json: AsJson = False,
    url: Annotated[
        str | None,
        typer.Option("--url", envvar="WEFT_URL", help="Run the program on this server.", show_default=False),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Run a program beside a model, and write its messages and its result.

    Without --url the model is loaded into this process and the program is trusted: it has all your permissions.

    Messages and the result go to standard output, the log and the traceback of a failure to standard error. Ctrl-C
    cancels the program. The exit status is 1 if it fails.
    """
    args = arguments(words or [], arg or [])
    messages = [value(text) for text in send or []]
    asked = limits(limit or [], network or [])
    content = read_file(file)
    screen = Screen(as_json=as_json, no_arguments=args is None)
    if url is not None:
        refuse_flags_of_engines(settings)
        from weft.cli.run_remote import run_on_server

        finished = run_on_server(
            url,
            api_key,
            file,
            content,
            {"args": args, "messages": messages, "limits": asked, "model": named_model},
            screen,
        )
    else:
        from weft.cli.run_local import LocalRun, run_here

        if named_model is not None:
            settings = with_setting(settings, "engine.model", named_model, "flag --model")
        finished = run_here(settings.config, LocalRun(file, content, args, messages, asked, sandbox=sandbox), screen)
    if not finished:
        raise typer.Exit(EXIT_FAILED)


def refuse_flags_of_engines(settings: Settings) -> None:
    """Raise `typer.BadParameter` for engine flags, which do not apply with a server."""
    flags = [given.source for given in settings.given.values() if given.source.startswith("flag ")]
    if flags:
        raise typer.BadParameter(
            f"{flags[0].removeprefix('flag ')} configures an engine in this process; omit it or --url"
        )
