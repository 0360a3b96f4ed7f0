"""Progress of loading a model, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Loading = Callable[[int, int], None]
"""Called with (bytes of weights read, bytes to read)."""

MIB = 1024 * 1024
QUIET_BYTES = 64 * MIB
"""Smaller models load at once and show no progress."""


def loading_progress(name: str, *, alone: bool = True) -> Loading:
    """Return a function that shows progress. One thread at a time may call it, and again after an engine's restart.

    Models that load at the same time (`alone` is false) get lines, because bars would overwrite each other.
    """
    return _Bar(name) if alone and sys.stderr.isatty() else _Lines(name)


class _Lines:
    """A line at every tenth."""

    def __init__(self, name: str):
        self._name = name
        self._tenth = -1

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if total < QUIET_BYTES or tenth == self._tenth:
            return
        self._tenth = tenth
        with contextlib.suppress(OSError):  # loading must not fail because the log's disk is full
            print(f"loading {self._name}: {done // MIB} of {total // MIB} MiB", file=sys.stderr, flush=True)


class _Bar:
    """A bar that is shown from the first call to the last."""

    def __init__(self, name: str):
        self._name = name
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if total < QUIET_BYTES:
            return
        if self._bar is None or self._task is None:
            self._start(total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
            if done >= total:
                self._bar.stop()
                self._bar = None

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._bar = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._name, total=total)
        self._bar.start()
        # The bar hides the cursor, which must be restored if loading fails.
        atexit.register(self._bar.stop)
