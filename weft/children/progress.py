"""What of a child's liveness its parent can see without asking: a counter that both processes map.

The child counts each turn of its loop and each piece of work; the parent reads. A counter in shared memory moves even
while the child is too busy to answer messages, and stands still when the child does.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_SIZE = 8


class ProgressCounter:
    """Eight bytes of a file, mapped. One process counts, the other reads."""

    def __init__(self, path: Path):
        """Map the file; make it, with 0, where it does not exist. Raises `OSError`."""
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _SIZE)

    def read(self) -> int:
        """How often `count` was called."""
        return int.from_bytes(self._shared[:_SIZE], "little")

    def count(self) -> None:
        """Note that something was done."""
        self._shared[:_SIZE] = (self.read() + 1).to_bytes(_SIZE, "little")

    def close(self) -> None:
        """Unmap the shared memory. Idempotent."""
        self._shared.close()


_own: ProgressCounter | None = None


def open_own(path: Path) -> None:
    """In a child: let `made_progress` count there."""
    global _own
    _own = ProgressCounter(path)


def made_progress() -> None:
    """Note that this process did something. Does nothing outside a child process."""
    if _own is not None:
        _own.count()
