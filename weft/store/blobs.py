"""Content in files beside the database: written before a row names them, removed after no row names them.

A blob is written once, under a name that is never used again, and belongs to one row, so writers never share a file.
Its name begins with the name of the server that wrote it. A blob without a row is removed once that server has ended;
before that, the server may be about to name it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol


class Blobs(Protocol):
    """Content by name. Every method may raise `OSError`."""

    def put(self, content: bytes) -> str:
        """Keep content; durable, under the new name that is returned. Where that fails, there is no file."""

    def get(self, name: str) -> bytes:
        """Content of this name. Raises `FileNotFoundError`."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove blobs that no row names. Does not raise: what cannot be removed is left for `sweep`."""


class MemoryBlobs:
    """The blobs of a database in memory."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._numbers = itertools.count()

    def put(self, content: bytes) -> str:
        """Keep content under a new name."""
        name = str(next(self._numbers))
        self._contents[name] = content
        return name

    def get(self, name: str) -> bytes:
        """Content of this name. Raises `FileNotFoundError`."""
        if name not in self._contents:
            raise FileNotFoundError(name)
        return self._contents[name]

    def remove(self, names: Iterable[str]) -> None:
        """Delete the content of these names, as far as it is there."""
        for name in names:
            self._contents.pop(name, None)


class FolderBlobs:
    """Files in a folder, which is made with the first one."""

    def __init__(self, folder: Path, server: str):
        """`server` is the name of the `ServerLock` that is held while files are written."""
        self._folder = folder
        self._server = server
        self._numbers = itertools.count()

    def put(self, content: bytes) -> str:
        """Write content to a new file."""
        name, path = self._new()
        try:
            with path.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self.sync()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return name

    def get(self, name: str) -> bytes:
        """Content of the file of this name."""
        return (self._folder / name).read_bytes()

    def remove(self, names: Iterable[str]) -> None:
        """Unlink the files, as far as they are there."""
        for name in names:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Make the names of new files durable, and that of their folder."""
        if self._folder.exists():
            for folder in (self._folder, self._folder.parent):
                number = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(number)
                finally:
                    os.close(number)

    def sweep(self, named: set[str], is_gone: Callable[[str], bool]) -> set[str]:
        """Remove the blobs of servers that have ended, except `named`; the names in `named` that have no file. Called
        inside a write transaction, so that no row changes meanwhile."""
        found = {path.name for path in self._folder.iterdir()} if self._folder.exists() else set()
        left = found - named
        gone = {server for server in {name.partition("-")[0] for name in left} if is_gone(server)}
        self.remove(name for name in left if name.partition("-")[0] in gone)
        return named - found

    def _new(self) -> tuple[str, Path]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{self._server}-{next(self._numbers)}"
        return name, self._folder / name
