"""Liveness of the servers that share a folder: each holds a lock on its own file until it ends.

The system releases the lock of a process that ends, also of one that is killed. Other servers may then end its runs and
remove the blobs that it had not named yet. `Database` holds one lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _SUFFIX = "server-", ".lock"


class ServerLock:
    """The lock of this server; `name` is unique and names its runs and blobs."""

    def __init__(self, folder: Path):
        """Locks nothing yet."""
        self.name = secrets.token_hex(8)
        self._folder = folder
        self._number: int | None = None

    def hold(self) -> None:
        """Take the lock; the file is made. Raises `OSError`. Idempotent."""
        path = self._path(self.name)
        while self._number is None:
            number = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Another server that looks whether we are gone has it for a moment, and may have removed the file.
                fcntl.flock(number, fcntl.LOCK_EX)
                if path.exists() and path.stat().st_ino == os.fstat(number).st_ino:
                    self._number = number
            finally:
                if self._number is None:
                    os.close(number)

    def release(self) -> None:
        """End the lock and remove its file. Idempotent."""
        if self._number is not None:
            with contextlib.suppress(OSError):
                self._path(self.name).unlink(missing_ok=True)
            os.close(self._number)
            self._number = None

    def is_gone(self, name: str) -> bool:
        """Whether the server of this name has ended."""
        return name != self.name and is_free(self._path(name))

    def tidy(self) -> None:
        """Remove the files of servers that have ended, each with its lock: a server that has made its file and waits
        for the lock finds the file gone, and makes it anew."""
        for path in self._folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            if path != self._path(self.name):
                with _locked(path) as was_free:
                    if was_free:
                        path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{_PREFIX}{name}{_SUFFIX}"


def is_free(path: Path) -> bool:
    """Whether no process holds the lock on this file."""
    with _locked(path) as free:
        return free


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock on a file to the end of the block. Whether it was free; one that is not there is."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(number)
