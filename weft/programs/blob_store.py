"""Stores of the bytes of uploaded programs: a folder, or memory.

Owns atomic writing, what a full disk says, and that of several processes on one folder only one changes a tenant's
programs at a time. It knows tenants and hashes, not what they mean; `Registry` calls it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from weft.abi.errors import StorageFailed
from weft.programs.disk import storage_failed

_INDEX, _TENANT, _CONTENT = "index.json", "tenant", ".program"
LOCK_PATIENCE_S = 10.0
_LOCK_PAUSE_S = 0.01

Stamp = tuple[int, ...]
"""Differs where something differs."""


class BlobStore(Protocol):
    """Bytes by tenant and hash. Everything raises `StorageFailed`."""

    def tenants(self) -> list[str]:
        """Those that have an index."""

    def changing(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """Excludes all other processes and threads from changing the tenant's programs, while inside."""

    def stamp(self, tenant: str) -> Stamp:
        """Of the tenant's index as it is now. Does not raise."""

    def index(self, tenant: str) -> bytes | None:
        """Its index; None where it has none."""

    def tidy(self, tenant: str) -> None:
        """Remove what interrupted writes have left; while changing."""

    def stored(self, tenant: str) -> set[str]:
        """Hashes of the content there is."""

    def put_index(self, tenant: str, index: bytes) -> None:
        """Replace a tenant's index as a whole; where that fails, the one before stays."""

    def put(self, tenant: str, hash: str, content: bytes) -> None:
        """Keep content; where that fails, there is none."""

    def get(self, tenant: str, hash: str) -> bytes:
        """Content of this hash. Raises `StorageFailed` where it is not there or not readable."""

    def remove(self, tenant: str, hashes: Iterable[str]) -> None:
        """Forget content. What cannot be removed now is left for the next start."""


class MemoryBlobStore:
    """For tests, and for servers that keep nothing."""

    def __init__(self) -> None:
        self._indexes: dict[str, bytes] = {}
        self._contents: dict[tuple[str, str], bytes] = {}

    def tenants(self) -> list[str]:
        """Those that have an index."""
        return list(self._indexes)

    def changing(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """A null context: one process has the memory."""
        return contextlib.nullcontext()

    def stamp(self, tenant: str) -> Stamp:
        """Always the same: no other process changes the memory."""
        return ()

    def index(self, tenant: str) -> bytes | None:
        """The tenant's index; None where it has none."""
        return self._indexes.get(tenant)

    def tidy(self, tenant: str) -> None:
        """Does nothing: a write to memory is never interrupted."""

    def stored(self, tenant: str) -> set[str]:
        """Hashes of a tenant's content."""
        return {hash for owner, hash in self._contents if owner == tenant}

    def put_index(self, tenant: str, index: bytes) -> None:
        """Replace the tenant's index as a whole."""
        self._indexes[tenant] = index

    def put(self, tenant: str, hash: str, content: bytes) -> None:
        """Keep content under its hash."""
        self._contents[tenant, hash] = content

    def get(self, tenant: str, hash: str) -> bytes:
        """Content of this hash. Raises `KeyError`."""
        return self._contents[tenant, hash]

    def remove(self, tenant: str, hashes: Iterable[str]) -> None:
        """Remove the content of these hashes, as far as it is there."""
        for hash in list(hashes):
            self._contents.pop((tenant, hash), None)


class FolderBlobStore:
    """A folder for each tenant, under a name that is safe whatever the tenant is called."""

    def __init__(self, root: Path):
        """The folder is made when something is first kept: a server without programs needs none."""
        self._root = root

    def tenants(self) -> list[str]:
        """Those that have an index."""
        try:
            return [
                (folder / _TENANT).read_text(encoding="utf-8")
                for folder in (sorted(self._root.iterdir()) if self._root.exists() else ())
                if (folder / _TENANT).is_file() and (folder / _INDEX).is_file()
            ]
        except OSError as error:
            raise self._unreadable(error) from error

    @contextlib.contextmanager
    def changing(self, tenant: str) -> Iterator[None]:
        """Holds a lock on a file of the tenant, which the system lets go of when a process ends. Blocks, for
        `LOCK_PATIENCE_S` at most."""
        number = self._locked(self._folder(tenant) / _TENANT, tenant)
        try:
            yield
        finally:
            os.close(number)

    def stamp(self, tenant: str) -> Stamp:
        """An index is replaced as a whole, by another file."""
        try:
            found = (self._folder(tenant) / _INDEX).stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def index(self, tenant: str) -> bytes | None:
        """The tenant's index; None where it has none."""
        try:
            return (self._folder(tenant) / _INDEX).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error

    def tidy(self, tenant: str) -> None:
        """Remove what interrupted writes have left."""
        for partial in self._folder(tenant).glob("*.partial"):
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def stored(self, tenant: str) -> set[str]:
        """Hashes of a tenant's content."""
        return {path.name.removesuffix(_CONTENT) for path in self._folder(tenant).glob(f"*{_CONTENT}")}

    def put_index(self, tenant: str, index: bytes) -> None:
        """Replace the tenant's index as a whole."""
        self._write(tenant, _INDEX, index)

    def put(self, tenant: str, hash: str, content: bytes) -> None:
        """Keep content under its hash."""
        self._write(tenant, hash + _CONTENT, content)

    def get(self, tenant: str, hash: str) -> bytes:
        """Content. Raises `StorageFailed` also where it is no longer what was put."""
        path = self._folder(tenant) / (hash + _CONTENT)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StorageFailed(f"the program {hash[:12]} cannot be read: {error.strerror}; upload it again") from error
        if hashlib.sha256(content).hexdigest() != hash:
            raise StorageFailed(f"the program {hash[:12]} is damaged on disk; delete it and upload it again")
        return content

    def remove(self, tenant: str, hashes: Iterable[str]) -> None:
        """Remove the content of these hashes, as far as it is there."""
        for hash in list(hashes):
            with contextlib.suppress(OSError):
                (self._folder(tenant) / (hash + _CONTENT)).unlink(missing_ok=True)

    def _folder(self, tenant: str) -> Path:
        return self._root / hashlib.sha256(tenant.encode()).hexdigest()[:32]

    def _locked(self, path: Path, tenant: str) -> int:
        """The number of the open file, whose lock we have; the file is made where it is missing."""
        give_up_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                if not path.is_file():
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    _create(path, tenant.encode())
                number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise self._unkept(error) from error
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return number
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    os.close(number)
                    raise storage_failed(
                        "another server is changing your programs and does not come to an end; try again", path
                    ) from None
            except OSError as error:
                os.close(number)
                raise self._unkept(error) from error
            os.close(number)
            time.sleep(_LOCK_PAUSE_S)

    def _write(self, tenant: str, name: str, data: bytes) -> None:
        try:
            _replace(self._folder(tenant) / name, data)
        except OSError as error:
            raise self._unkept(error) from error

    def _unkept(self, error: OSError) -> StorageFailed:
        return storage_failed(
            f"the program cannot be kept: {error.strerror}; free space in the server's programs.data_dir and send it "
            "again",
            self._root,
        )

    def _unreadable(self, error: OSError) -> StorageFailed:
        return storage_failed(f"programs cannot be read: {error.strerror}; set programs.data_dir", self._root)


def _replace(path: Path, data: bytes) -> None:
    with _written(path, data) as partial:
        partial.replace(path)


def _create(path: Path, data: bytes) -> None:
    """As a whole, and never instead of one that is there: somebody may hold its lock already."""
    with _written(path, data) as partial:
        try:
            path.hardlink_to(partial)
        except (FileExistsError, FileNotFoundError):
            pass  # it is there; another server may even have tidied the partial one up
        except OSError:
            partial.replace(path)  # a file system without links


@contextlib.contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside the path, to be given its name; durable then."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield partial
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a power cut too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
