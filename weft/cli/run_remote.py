"""A program on a server, for `weft run --url`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from weft.abi.errors import InvalidRequest, WeftError
from weft.cli.run_values import Screen
from weft.client import Client


def run_on_server(
    url: str, api_key: str | None, file: Path, content: bytes, options: Mapping[str, Any], screen: Screen
) -> bool:
    """Run the file on a server and return whether it finished. A Wasm module is a program of the server while it runs,
    under a name of its own: another program may have the file's.

    Raises `ClientError`, and `InvalidRequest` for a file that is not a program.
    """
    source: str | None = None
    program: str | None = None
    with Client(url, api_key=api_key) as client, ExitStack() as stack:
        if content.startswith(b"\0asm"):
            program = client.programs.upload(f"{file.stem[:55]}-{secrets.token_hex(4)}", content).name
            stack.callback(_delete, client, program)
        else:
            try:
                source = content.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"{file} is not UTF-8 text: {error}") from error
        args, rest = options["args"], {name: value for name, value in options.items() if name != "args"}
        # Closing the stream, as Ctrl-C does too, ends the run.
        with closing(client.programs.stream(program, args, source=source, **rest)) as events:
            return screen.follow(events, log_of=client.runs.logs)


def _delete(client: Client, program: str) -> None:
    with suppress(WeftError):  # what ended the run is what the user has to know
        client.programs.delete(program)
