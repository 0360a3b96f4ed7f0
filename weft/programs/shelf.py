"""Where the bytes of uploaded programs are: a folder, or memory.

Owns atomic writing and what a full disk says. It knows tenants and hashes, not what they mean; `Registry` calls it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from weft.programs.errors import StorageFailed

_INDEX, _TENANT, _CONTENT = "index.json", "tenant", ".program"


class Shelf(Protocol):
    """Bytes by tenant and hash. Everything raises `StorageFailed`."""

    def load(self) -> dict[str, bytes]:
        """The index of every tenant there is."""

    def stored(self, tenant: str) -> set[str]:
        """Hashes of the content there is."""

    def put_index(self, tenant: str, index: bytes) -> None:
        """Replace a tenant's index as a whole; where that fails, the one before stays."""

    def put(self, tenant: str, hash: str, content: bytes) -> None:
        """Keep content; where that fails, there is none."""

    def get(self, tenant: str, hash: str) -> bytes:
        """Content that was put."""

    def remove(self, tenant: str, hashes: Iterable[str]) -> None:
        """Forget content. What cannot be removed now is left for the next start."""


class MemoryShelf:
    """For tests, and for servers that keep nothing."""

    def __init__(self) -> None:
        self._indexes: dict[str, bytes] = {}
        self._contents: dict[tuple[str, str], bytes] = {}

    def load(self) -> dict[str, bytes]:
        """The index of every tenant."""
        return dict(self._indexes)

    def stored(self, tenant: str) -> set[str]:
        """Hashes of a tenant's content."""
        return {hash for owner, hash in self._contents if owner == tenant}

    def put_index(self, tenant: str, index: bytes) -> None:
        """Replace an index."""
        self._indexes[tenant] = index

    def put(self, tenant: str, hash: str, content: bytes) -> None:
        """Keep content."""
        self._contents[tenant, hash] = content

    def get(self, tenant: str, hash: str) -> bytes:
        """Content."""
        return self._contents[tenant, hash]

    def remove(self, tenant: str, hashes: Iterable[str]) -> None:
        """Forget content."""
        for hash in list(hashes):
            self._contents.pop((tenant, hash), None)


class FolderShelf:
    """A folder for each tenant, under a name that is safe whatever the tenant is called."""

    def __init__(self, root: Path):
        """The folder is made when something is first kept: a server without programs needs none."""
        self._root = root

    def load(self) -> dict[str, bytes]:
        """The index of every tenant. Removes what an interrupted write has left."""
        found = {}
        try:
            for folder in sorted(self._root.iterdir()) if self._root.exists() else ():
                if (folder / _TENANT).is_file() and (folder / _INDEX).is_file():
                    for partial in folder.glob("*.partial"):
                        partial.unlink(missing_ok=True)
                    found[(folder / _TENANT).read_text(encoding="utf-8")] = (folder / _INDEX).read_bytes()
        except OSError as error:
            raise StorageFailed(
                f"programs cannot be read from {self._root}: {error.strerror}; set programs.data_dir"
            ) from error
        return found

    def stored(self, tenant: str) -> set[str]:
        """Hashes of a tenant's content."""
        return {path.name.removesuffix(_CONTENT) for path in self._folder(tenant).glob(f"*{_CONTENT}")}

    def put_index(self, tenant: str, index: bytes) -> None:
        """Replace an index."""
        self._write(tenant, _INDEX, index)

    def put(self, tenant: str, hash: str, content: bytes) -> None:
        """Keep content."""
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
        """Forget content."""
        for hash in list(hashes):
            with contextlib.suppress(OSError):
                (self._folder(tenant) / (hash + _CONTENT)).unlink(missing_ok=True)

    def _folder(self, tenant: str) -> Path:
        return self._root / hashlib.sha256(tenant.encode()).hexdigest()[:32]

    def _write(self, tenant: str, name: str, data: bytes) -> None:
        folder = self._folder(tenant)
        try:
            if not (folder / _TENANT).is_file():
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _replace(folder / _TENANT, tenant.encode())
            _replace(folder / name, data)
        except OSError as error:
            raise StorageFailed(
                f"the program cannot be kept: {error.strerror} in {self._root}; free space there and send it again"
            ) from error


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
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
