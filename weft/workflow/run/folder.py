"""The folder beside the results of a run, and the file of the results: checked before anything is written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.abi.errors import ConfigError, InvalidRequest


def check_out(out: Path, rows: Path | None) -> None:
    """Raise `InvalidRequest` for a file that results cannot be written to: a folder, and the file of the rows, which
    are read while results are written."""
    if out.is_dir():
        raise InvalidRequest(f"out: {out} is a folder: name a file in it", "out")
    if rows is not None and out.exists() and out.samefile(rows):
        raise InvalidRequest(f"out: {out} is the file of the rows, which results would overwrite: name another", "out")


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Keep other runs, of this process and of others, out of a folder within the block. It is made where it does not
    exist. Raises `ConfigError` where another run holds it."""
    number = _lock(folder)
    try:
        yield
    finally:
        os.close(number)


def _lock(folder: Path) -> int:
    """The descriptor of the folder, locked. The system releases the lock of a process that ends."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another run has just ended, and removed it
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(number)):
                return number
        except BlockingIOError:
            os.close(number)
            raise ConfigError(
                f"another run holds {folder} and writes these results: wait for its end, or choose another file"
            ) from None
        os.close(number)
