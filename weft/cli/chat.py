"""`weft chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.abi.errors import ConfigError, WeftError
from weft.cli.files import write_file
from weft.cli.options import ENGINE_KEYS, Model, NamedModel, takes_settings
from weft.cli.sampling_flags import MaxTokens, MinP, Seed, Stop, Temperature, TopK, TopP, given
from weft.cli.settings import Settings, with_setting
from weft.cli.talk import LocalTalker, RemoteTalker, Talker
from weft.cli.wrapping import WordWrap

HISTORY_LENGTH = 1000

EXAMPLES = """Examples:

  weft chat                                        weft-tiny, in this process

  weft chat --system 'Answer in rhymes.' --temperature 0.7

  weft chat --url http://127.0.0.1:8000            on a running server

  echo 'Tell me a joke.' | weft chat --temperature 0
"""


def register(app: typer.Typer) -> None:
    """Add the command `chat` to the application."""
    app.command("chat", epilog=EXAMPLES)(chat)


@takes_settings(*ENGINE_KEYS)
def chat(
    settings: Settings,
    model: Model = None,
    named_model: NamedModel = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="The system prompt.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="WEFT_URL", help="Use this server instead of a model in this process.", show_default=False
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="WEFT_API_KEY", help="API key for the server.", show_default=False)
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Chat with a model, in this process or on a server.

    Ctrl-C stops the answer, Ctrl-D or /exit ends the chat, /help lists commands. Pasted text of several lines is one
    message.
    """
    if model is not None and named_model is not None:
        raise typer.BadParameter("give either MODEL or --model")
    if named_model is not None:
        settings = with_setting(settings, "engine.model", named_model, "flag --model")
    options = given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    if url is None:
        talker: Talker = LocalTalker(settings.config.engine)
    else:
        talker = RemoteTalker(url, model or named_model, api_key)
    with contextlib.closing(talker), _history(sys.stdin.isatty()):
        ChatSession(talker, options, system, interactive=sys.stdin.isatty()).run()


class ChatSession:
    """A conversation in the terminal, and its commands. `read` shows a prompt and returns a line of input."""

    def __init__(
        self,
        talker: Talker,
        options: Mapping[str, Any],
        system: str | None = None,
        *,
        interactive: bool = True,
        read: Callable[[str], str] = input,
    ):
        self._talker = talker
        self._options = options
        self._system = system
        self._interactive = interactive
        self._read = read
        self.messages: list[dict[str, str]] = []
        """All messages except the system prompt."""
        self._commands: Mapping[str, tuple[Callable[[str], None], str]] = {
            "help": (self._help, "list commands"),
            "reset": (self._reset, "clear the conversation"),
            "system": (
                self._set_system,
                "TEXT: set the system prompt and clear the conversation; without TEXT, show it",
            ),
            "save": (self._save, "FILE: write the conversation as JSON"),
            "exit": (self._help, "exit (or Ctrl-D)"),
        }

    def run(self) -> None:
        """Hold the conversation until the end of input or /exit."""
        if self._interactive:
            print(f"Talking to {self._talker.description}.\n/help lists commands.", file=sys.stderr)
        while True:
            try:
                line = self._read("> " if self._interactive else "").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit to exit)", file=sys.stderr)
                continue
            if line.split(maxsplit=1)[:1] == ["/exit"]:
                return
            if line.startswith("/") and not line.startswith("//"):
                self._command(line[1:])
            elif line:
                self._turn(line.removeprefix("/") if line.startswith("//") else line)
        if self._interactive:
            print(file=sys.stderr)

    def _turn(self, text: str) -> None:
        """Ask and print the answer. A question that fails is removed; a stopped answer is kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer: list[str] = []
        screen = WordWrap(sys.stdout)
        try:
            try:
                with contextlib.closing(self._talker.reply([*system, *self.messages], self._options)) as pieces:
                    for piece in pieces:
                        answer.append(piece)
                        screen.write(piece)
            finally:
                screen.finish()
        except KeyboardInterrupt:
            print(" (stopped)", end="", file=sys.stderr)
        except WeftError as error:
            if not self._interactive:
                raise
            print(f"{chr(10) if answer else ''}weft: {error.message}", file=sys.stderr)
            if not answer:
                self.messages.pop()
                return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            print(
                f"Unknown command /{name}; /help lists commands, and //{name} sends /{name} as a message.",
                file=sys.stderr,
            )
            return
        self._commands[name][0](rest.strip())

    def _help(self, rest: str) -> None:
        for name, (_, text) in self._commands.items():
            print(f"/{name:8}{text}", file=sys.stderr)

    def _reset(self, rest: str) -> None:
        self.messages.clear()
        print("The conversation is cleared.", file=sys.stderr)

    def _set_system(self, rest: str) -> None:
        if not rest:
            print(self._system or "There is no system prompt.", file=sys.stderr)
            return
        self._system = rest
        self._reset("")

    def _save(self, rest: str) -> None:
        if not rest:
            print("/save needs a file name.", file=sys.stderr)
            return
        system = [{"role": "system", "content": self._system}] if self._system else []
        content = {"model": self._talker.name, "messages": [*system, *self.messages]}
        try:
            write_file(_expanded(rest), json.dumps(content, indent=2) + "\n")
        except WeftError as error:
            if not self._interactive:
                raise
            print(f"weft: {error.message}", file=sys.stderr)
        else:
            print(f"Saved {len(self.messages)} messages to {rest}.", file=sys.stderr)


@contextlib.contextmanager
def _history(interactive: bool) -> Iterator[None]:
    """Enable line editing with the history of earlier chats, on a terminal with readline."""
    if not interactive:
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "weft"
    file = folder / "chat_history"
    # Python disables it. With bracketed paste, pasted lines are one text, which Enter sends.
    readline.parse_and_bind("set enable-bracketed-paste on")
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LENGTH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(file)


def _expanded(path: str) -> Path:
    """A path with `~` for a home directory. Raises `ConfigError` where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from None
