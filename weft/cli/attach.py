"""A terminal attached to a run on a server: writes its messages, and sends it the lines of the keyboard or a pipe."""

from __future__ import annotations

import sys
import threading

from websockets.exceptions import WebSocketException

from weft.cli.run_values import Screen, value_of
from weft.client import Client
from weft.client.synchronous import Attached


def attach_to(client: Client, run_id: str, screen: Screen) -> bool:
    """Follow the run to its end and return whether it finished. The end of the input does not end it."""
    with client.runs.attach(run_id) as attached:
        # A daemon, because a thread that waits for the keyboard cannot be stopped.
        threading.Thread(target=_pass_lines, args=(attached,), daemon=True).start()
        return screen.follow(attached)


def _pass_lines(attached: Attached) -> None:
    try:
        for line in sys.stdin:
            if text := line.rstrip("\r\n"):
                attached.send(value_of(text))
    except (OSError, ValueError, WebSocketException):
        return  # the terminal or the connection is gone, which the other thread tells
