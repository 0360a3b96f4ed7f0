"""The console script `weft`: its commands, and how errors are reported.

Each command is a separate module that imports its dependencies when it runs, so `weft --help` loads neither torch nor a
web server.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.abi.errors import WeftError
from weft.cli import chat, doctor, generate, models, profile, programs, run, serve, sessions, sim, version, workflow
from weft.cli.bench import group as bench
from weft.version import __version__

EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 130, 141
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class CommandGroup(TyperGroup):
    """Reports every error that is not a bug in one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Errors of Weft and a full disk end with status 1, Ctrl-C with 130, a closed pipe with 141."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush_output()
        except WeftError as error:
            if _debugging():
                raise
            typer.echo(f"weft: {error.message}", err=True)
            raise typer.Exit(EXIT_FAILURE) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            _drop_output()
            raise typer.Exit(EXIT_PIPE) from error
        except OSError as error:
            if error.errno not in NO_ROOM or _debugging():
                raise
            if error.filename is None:
                _drop_output()
            typer.echo(f"weft: {error.filename or 'the output'} cannot be written: {error.strerror}", err=True)
            raise typer.Exit(EXIT_FAILURE) from error


def _flush_output() -> None:
    """Flush here, where an error such as a full disk is reported, and not at interpreter exit."""
    if sys.stdout is not None:  # None if the parent process closed it
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard the rest of the output; the interpreter would report the same error again when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Commands use weft-tiny, the model in the package, unless you name another. Try [bold]weft chat[/bold]. "
    "`weft COMMAND --help` has examples.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


def _set_debug(wanted: bool) -> None:
    if wanted:
        os.environ["WEFT_DEBUG"] = "1"


def _debugging() -> bool:
    return os.environ.get("WEFT_DEBUG", "").lower() not in ("", "0", "false")


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks of errors (or set WEFT_DEBUG=1).")
    ] = False,
) -> None:
    """Serve open-weights language models, and run LLM programs beside them."""


serve.register(app)
chat.register(app)
generate.register(app)
run.register(app)
programs.register(app)
sessions.register(app)
bench.register(app)
profile.register(app)
sim.register(app)
workflow.register(app)
models.register(app)
doctor.register(app)
version.register(app)


def main() -> None:
    """Run the command line; the entry point of the console script."""
    app(prog_name="weft")


if __name__ == "__main__":
    main()
