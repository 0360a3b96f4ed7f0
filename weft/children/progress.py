"""The progress of a child process: a counter in memory that parent and child map.

The child increments it with each turn of its loop and each piece of work; the parent reads it. The counter advances
even while the child is too busy to answer messages.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_SIZE = 8


class ProgressCounter:
    """A counter in eight mapped bytes of a file. One process increments it, the other reads it."""

    def __init__(self, path: Path):
        """Map the file; create it with 0 if it does not exist. Raises `OSError`."""
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _SIZE)

    def read(self) -> int:
        """Number of calls of `count`."""
        return int.from_bytes(self._shared[:_SIZE], "little")

    def count(self) -> None:
        """Increment the counter. One process alone calls it: the increment is not atomic."""
        self._shared[:_SIZE] = (self.read() + 1).to_bytes(_SIZE, "little")

    def close(self) -> None:
        """Unmap the shared memory. Idempotent."""
        self._shared.close()


_own: ProgressCounter | None = None


def open_own(path: Path) -> None:
    """In a child: open the counter that `made_progress` increments."""
    global _own
    _own = ProgressCounter(path)


def made_progress() -> None:
    """Increment this process's counter. Does nothing outside a child process."""
    if _own is not None:
        _own.count()
