"""Shared by `weft run` and `weft programs`: arguments from the command line, and a run's events on the terminal.

Messages and the result go to standard output, the log and errors to standard error. Programs send text in pieces, so
string messages are written without separators. Other messages, and results that are not strings, are written as one
line of JSON each; with `--json` strings are too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer

from weft.abi.errors import WeftError
from weft.client.values import LogEntry, Run, RunError, RunEvent

EXIT_FAILED = 1

Arg = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        "-a",
        metavar="NAME=VALUE",
        help="A field of the arguments; repeatable. VALUE is JSON if it parses, otherwise a string.",
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="A limit, such as cpu_s=10 or tokens=5000; repeatable. docs/api.md lists them.",
    ),
]
Send = Annotated[
    list[str] | None,
    typer.Option("--send", metavar="VALUE", help="A message that the program finds when it starts; repeatable."),
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        "--network", metavar="HOST", help="A host that the program may connect to; repeatable. '*': every public host."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write every message as a line of JSON.")]
Url = Annotated[str | None, typer.Option("--url", envvar="WEFT_URL", help="Address of the server.", show_default=False)]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="WEFT_API_KEY", help="API key for the server.", show_default=False)
]


def value_of(text: str) -> Any:
    """Parse JSON; text that is not JSON is a string value."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return text


def arguments(words: Sequence[str], fields: Iterable[str]) -> Any:
    """Return the argument of a program: one word is a value, several are a list, fields are an object, none is None.

    Raises `typer.BadParameter`.
    """
    named = dict(pair(field, "--arg") for field in fields)
    if named and words:
        raise typer.BadParameter("give arguments either after -- or with --arg")
    if named:
        return named
    values = [value_of(word) for word in words]
    return values[0] if len(values) == 1 else values or None


def limits(pairs: Iterable[str], network: Sequence[str]) -> dict[str, Any]:
    """Return limits in the form of the HTTP API. Raises `typer.BadParameter`."""
    given = dict(pair(text, "--limit") for text in pairs)
    return given | ({"network": list(network)} if network else {})


def pair(text: str, flag: str) -> tuple[str, Any]:
    """The name and the value of `NAME=VALUE`, which is JSON if it parses. Raises `typer.BadParameter`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{flag} {text}: write NAME=VALUE")
    return name, value_of(value)


class Screen:
    """Writes the events of a run. Call `close` at the end to terminate an open line."""

    def __init__(self, *, as_json: bool = False, no_arguments: bool = False):
        """`no_arguments`: the command line had none; used to explain a failure on None."""
        self._as_json = as_json
        self._no_arguments = no_arguments
        self._in_line = False
        """Whether the last text written has no line break at its end."""

    def message(self, value: Any) -> None:
        """Write a message of the program: a text as it is, other values as JSON on a line."""
        if isinstance(value, str) and not self._as_json:
            if value:
                print(value, end="", flush=True)
                self._in_line = not value.endswith("\n")
        else:
            self._line(value)

    def log(self, line: LogEntry) -> None:
        """Write a line of the program's log to standard error."""
        self._aside(f"{line.level}: {line.text}")

    def result(self, value: Any) -> None:
        """Write the result; None is written only with `as_json`."""
        if value is not None or self._as_json:
            self._line(value)
        self.close()

    def failure(self, status: str, error: RunError) -> None:
        """Write why the run did not finish, to standard error."""
        self.close()
        if error.traceback:
            self._aside(error.traceback)
        if self._no_arguments and "'NoneType'" in error.message:
            self._aside("weft: main received None because no arguments were given; add --arg NAME=VALUE or -- VALUE")
        # A message may begin with the error's kind, where the traceback has the class name.
        if not any(text in error.traceback for text in (error.message, error.message.partition(": ")[2]) if text):
            blamed = error.kind if error.param is None else f"{error.kind} ({error.param})"
            told = error.message if error.kind in ("program_failed", "run_cancelled") else f"{blamed}: {error.message}"
            self._aside(f"weft: the program {'was ' if status == 'cancelled' else ''}{status}: {told}")

    def close(self) -> None:
        """Terminate an open line. Idempotent."""
        if self._in_line:
            self._in_line = False
            print(flush=True)

    def follow(self, events: Iterable[RunEvent], *, log_of: Callable[[str], Iterable[LogEntry]] | None = None) -> bool:
        """Write events as they arrive and return whether the run finished.

        `log_of` returns the log of a run by its id; it is written at the end. Raises `WeftError` if the stream ends
        before the run.
        """
        try:
            return self._follow(events, log_of)
        except OSError:
            raise  # most likely an error of the output itself
        except BaseException:
            self.close()
            raise

    def end(self, run: Run) -> bool:
        """Write the result or the error of a run that has ended; return whether it finished."""
        if run.error is not None:
            self.failure(run.status, run.error)
            return False
        self.result(run.result)
        return True

    # ---- inside

    def _follow(self, events: Iterable[RunEvent], log_of: Callable[[str], Iterable[LogEntry]] | None) -> bool:
        for event in events:
            if event.type == "run" and event.run is not None:
                if event.missed:
                    self._aside(f"weft: {event.missed} earlier messages are no longer kept")
            elif event.type == "message":
                self.message(event.message)
            elif event.type == "error" and event.error is not None:
                self._aside(f"weft: {event.error.message}")
            elif event.type == "end" and event.run is not None:
                for line in log_of(event.run.id) if log_of is not None else ():
                    self.log(line)
                return self.end(event.run)
        raise WeftError("the server closed the stream before the run ended; see `weft programs runs`")

    def _line(self, value: Any) -> None:
        """On a line of its own."""
        self.close()
        if isinstance(value, str) and not self._as_json:
            print(value, flush=True)
        else:
            print(json.dumps(value, ensure_ascii=False), flush=True)

    def _aside(self, text: str) -> None:
        """On standard error, and where both are one terminal, not in the middle of a line."""
        if sys.stdout.isatty() and sys.stderr.isatty():
            self.close()
        print(text, file=sys.stderr, flush=True)
