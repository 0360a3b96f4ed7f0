"""A terminal attached to a run on a server: its messages out, lines of the keyboard or of a pipe in."""

from __future__ import annotations

import sys
import threading

from websockets.exceptions import WebSocketException

from weft.cli.run_values import Screen, value_of
from weft.client import Client
from weft.client.synchronous import Attached


def attach_to(client: Client, run_id: str, screen: Screen) -> bool:
    """Until the run ends; whether it finished. The end of the input ends nothing."""
    with client.runs.attach(run_id) as attached:
        # A daemon: whoever reads the keyboard cannot be told to stop.
        threading.Thread(target=_pass_lines, args=(attached,), daemon=True).start()
        return screen.follow(attached)


def _pass_lines(attached: Attached) -> None:
    try:
        for line in sys.stdin:
            if text := line.rstrip("\r\n"):
                attached.send(value_of(text))
    except (OSError, ValueError, WebSocketException):
        return  # the terminal or the connection is gone, which the other thread tells
