"""A terminal attached to a run on a server: writes the run's messages and sends it lines of standard input."""

from __future__ import annotations

import sys
import threading

from websockets.exceptions import WebSocketException

from weft.cli.run_values import Screen, value_of
from weft.client import Client
from weft.client.synchronous import Attached


def attach_to(client: Client, run_id: str, screen: Screen) -> bool:
    """Follow the run to its end and return whether it finished. The end of standard input does not end the run."""
    with client.runs.attach(run_id) as attached:
        # A daemon, because a thread that blocks on standard input cannot be stopped.
        threading.Thread(target=_pass_lines, args=(attached,), daemon=True).start()
        return screen.follow(attached)


def _pass_lines(attached: Attached) -> None:
    try:
        for line in sys.stdin:
            if text := line.rstrip("\r\n"):
                attached.send(value_of(text))
    except (OSError, ValueError, WebSocketException):
        return  # the terminal or the connection is closed; the other thread reports it
