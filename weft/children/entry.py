"""Entry point of a child process: `python -m weft.children.entry MODULE ADDRESS` runs `MODULE.main(ADDRESS)`.

SIGTERM and SIGINT are ignored before anything else is imported. They reach the whole process group (a terminal,
`timeout`, a service manager), and the front must finish its requests before its children end. A child ends when its
stdin closes: the front closes it to stop the child, and the kernel closes it when the front is killed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from weft.children.progress import open_own

STOP_GRACE_S = 5.0
"""Time that a child has to finish its work after its stdin has closed."""


def ignore_group_signals() -> None:
    """Leave SIGTERM and SIGINT to the front. Call it on the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def call_when_stdin_closes(stop: Callable[[], object], address: str) -> None:
    """When stdin closes, remove the folder of the socket at the address and call `stop`, on a thread; end the process
    if it still runs `STOP_GRACE_S` seconds later. The front, which made the folder, may have been killed."""
    folder = Path(address.removeprefix("ipc://")).parent

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        stop()
        time.sleep(STOP_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="weft-parent-watch", daemon=True).start()


def main(module: str, address: str) -> int:
    """Run a child's module and return the exit status of the process."""
    ignore_group_signals()
    open_own(Path(address.removeprefix("ipc://")).with_suffix(".progress"))
    status: int = importlib.import_module(module).main(address)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
