"""A child process that does what its argument says: `weft.children.entry` runs it."""

from __future__ import annotations

import sys
import threading

from weft.children.entry import call_when_stdin_closes


def main(address: str) -> int:
    """Wait until stdin closes, or end at once."""
    how = sys.stdin.buffer.readline().decode().strip()
    if how == "end":
        return 7
    stopped = threading.Event()
    call_when_stdin_closes(stopped.set, address)
    stopped.wait()
    return 0
