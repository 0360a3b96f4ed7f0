"""What `weft run` and `weft programs` share: arguments from the command line, and a run's news on the terminal.

Messages and the result go to standard output; what a program notes, and why it failed, to standard error. Programs send
text in pieces, as they write it, so messages that are texts are written one after the other, as they are, and read as
one text. Everything else is JSON, on a line of its own, and so is the result. With `--json` each message is a line of
JSON, texts too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from weft.abi.errors import WeftError
from weft.client.values import LogEntry, Run, RunError, RunEvent

EXIT_FAILED = 1

Arg = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", "-a", metavar="NAME=VALUE", help="A field of the arguments; repeat. VALUE is JSON, or else a text."
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", metavar="NAME=VALUE", help="Such as cpu_s=10 or tokens=5000; repeat. docs/api.md lists them."
    ),
]
Send = Annotated[
    list[str] | None,
    typer.Option("--send", metavar="VALUE", help="A message that waits for it when it starts; repeat."),
]
Network = Annotated[
    list[str] | None,
    typer.Option("--network", metavar="HOST", help="A host that it may talk to; repeat. '*': every public one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write texts as JSON too, each on its line.")]
Url = Annotated[str | None, typer.Option("--url", envvar="WEFT_URL", help="Of the server.", show_default=False)]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="WEFT_API_KEY", help="For the server.", show_default=False)
]


def value_of(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def arguments(words: Sequence[str], fields: Iterable[str]) -> Any:
    """The arguments of a program: one word is a value, several are a list, fields are an object, nothing is null.

    Raises `typer.BadParameter`.
    """
    named = dict(_pair(field, "--arg") for field in fields)
    if named and words:
        raise typer.BadParameter("arguments after -- and --arg: give one kind of them")
    if named:
        return named
    values = [value_of(word) for word in words]
    return values[0] if len(values) == 1 else values or None


def limits(pairs: Iterable[str], network: Sequence[str]) -> dict[str, Any]:
    """Limits as the API takes them. Raises `typer.BadParameter`."""
    given = dict(_pair(pair, "--limit") for pair in pairs)
    return given | ({"network": list(network)} if network else {})


def _pair(text: str, flag: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{flag} {text}: write NAME=VALUE")
    return name, value_of(value)


class Screen:
    """Writes a run's news. `close` it, or a text may stay without the end of its line."""

    def __init__(self, *, as_json: bool = False, no_arguments: bool = False):
        """`no_arguments`: the command gave none, which explains a program that fails on None."""
        self._as_json = as_json
        self._no_arguments = no_arguments
        self._in_line = False
        """Whether the last text that was written did not end its line."""

    def message(self, value: Any) -> None:
        """Something that it said."""
        if isinstance(value, str) and not self._as_json:
            if value:
                print(value, end="", flush=True)
                self._in_line = not value.endswith("\n")
        else:
            self._line(value)

    def log(self, line: LogEntry) -> None:
        """Something that it noted."""
        self._aside(f"{line.level}: {line.text}")

    def result(self, value: Any) -> None:
        """What it returned; nothing for null, unless everything is to be JSON."""
        if value is not None or self._as_json:
            self._line(value)
        self.close()

    def failure(self, status: str, error: RunError) -> None:
        """Why it did not finish."""
        self.close()
        if error.traceback:
            self._aside(error.traceback)
        if self._no_arguments and "'NoneType'" in error.message:
            self._aside("weft: main received None, because no arguments were given: add --arg NAME=VALUE or -- VALUE")
        # A message may begin with the error's kind, where the traceback has the name of its class.
        if not any(text in error.traceback for text in (error.message, error.message.partition(": ")[2]) if text):
            blamed = error.kind if error.param is None else f"{error.kind} ({error.param})"
            told = error.message if error.kind in ("program_failed", "run_cancelled") else f"{blamed}: {error.message}"
            self._aside(f"weft: the program {'was ' if status == 'cancelled' else ''}{status}: {told}")

    def close(self) -> None:
        """End the line. Idempotent."""
        if self._in_line:
            self._in_line = False
            print(flush=True)

    def follow(self, events: Iterable[RunEvent], *, log_of: Callable[[str], Iterable[LogEntry]] | None = None) -> bool:
        """Write events as they come, and at the end the log, where `log_of` a run's id is known. Whether the run
        finished. Raises `WeftError` for a stream without an end."""
        try:
            return self._follow(events, log_of)
        except OSError:
            raise  # most likely of the output itself
        except BaseException:
            self.close()
            raise

    def end(self, run: Run) -> bool:
        """Write how it ended. Whether it finished."""
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
        raise WeftError("the server ended the stream before the run's end; see `weft programs runs`")

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
