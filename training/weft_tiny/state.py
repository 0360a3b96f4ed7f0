"""The state of a training run on disk: checkpoints, the log, the running lock and the pause file.

Standard library only, so that benchmarks can ask whether training runs without importing torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

KEPT = 2
"""Checkpoints that are kept: the newest and the one before it."""
_DIGEST_BYTES = 32


def default_directory() -> Path:
    """``weft-tiny`` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft-tiny"


def running_lock() -> Path:
    """The lock that a trainer holds while it computes: one file per user, independent of the state directory."""
    return default_directory() / "running.lock"


class ProcessLock:
    """A file lock that this process holds, with its process id and state directory written into the file."""

    def __init__(self, path: Path, state: Path) -> None:
        self.path = path
        self._note = json.dumps({"pid": os.getpid(), "state": str(state.resolve())}).encode()
        self._file: BinaryIO | None = None

    def acquire(self, wait: bool = False) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: another process holds it and ``wait`` is false.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        file.truncate(0)
        file.write(self._note)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock of the trainer."""
        if self._file is not None:
            self._file.close()
            self._file = None


def holder(path: Path, wait: bool = False) -> dict[str, Any] | None:
    """Return what the holder of a lock wrote about itself; ``None`` if it is free. ``wait`` blocks until then."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return dict(json.loads(file.read() or b"{}"))
    return None


class RunState:
    """A state directory. Only the trainer writes checkpoints and the log; any process may create the pause file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pause = directory / "pause"
        self.log = directory / "log.jsonl"
        self.owner = directory / "trainer.lock"
        directory.mkdir(parents=True, exist_ok=True)

    def checkpoints(self) -> list[Path]:
        """The paths of all checkpoints, newest first."""
        return sorted(self.directory.glob("checkpoint-*.pt"), reverse=True)

    def save(self, tokens: int, write: Callable[[BinaryIO], None]) -> Path:
        """Write a checkpoint: SHA-256 of the content, then the content; durable when the name appears.

        ``tokens`` orders the checkpoints. The file is written under a temporary name, synced and renamed.
        """
        path = self.directory / f"checkpoint-{tokens:015d}.pt"
        partial = self.directory / "checkpoint.partial"
        with partial.open("w+b") as file:
            file.write(bytes(_DIGEST_BYTES))
            write(file)
            file.seek(_DIGEST_BYTES)
            digest = hashlib.file_digest(file, "sha256").digest()
            file.seek(0)
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        for old in self.checkpoints()[KEPT:]:
            old.unlink()
        return path

    @contextmanager
    def newest(self) -> Iterator[BinaryIO | None]:
        """The newest checkpoint whose checksum is right, opened at its content; ``None`` if there is none."""
        for path in self.checkpoints():
            with path.open("rb") as file:
                wanted = file.read(_DIGEST_BYTES)
                if hashlib.file_digest(file, "sha256").digest() == wanted:
                    file.seek(_DIGEST_BYTES)
                    yield file
                    return
            self.note("damaged", file=path.name)
        yield None

    def note(self, event: str, **fields: Any) -> None:
        """Append one JSON line to the log."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **fields})
        with self.log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def last(self, event: str) -> dict[str, Any] | None:
        """The last log line of an event; a line that a crash cut short is skipped."""
        found = None
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["event"] == event:
                found = entry
        return found
