"""`Database`: one folder of a server's data, a file of rows and blobs beside it.

Owns opening (schema, clean-up after interrupted writes), the thread that writes, and the
errors of the disk: clients receive the cause without a path, the log has it once with the path. Several processes may
open a folder. Readers have their own connections and never wait for writers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, delete, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from weft.abi.errors import StorageFailed
from weft.store import sqlite
from weft.store.blobs import Blobs, FolderBlobs, MemoryBlobs
from weft.store.schema import migrate, program_names, program_values, program_versions
from weft.store.servers import ServerLock
from weft.store.writer import GroupWriter

T = TypeVar("T")

FILE = "weft.sqlite"
BLOBS = "blobs"

logger = logging.getLogger("weft.store")

QUIET_S = 60.0
"""Seconds of commits without a failure, after which data counts as stored again."""


class Database:
    """The connections to one folder. Used from any thread. Every method may raise `StorageFailed`."""

    def __init__(self, folder: Path | None = None, *, place: str = "the server's programs.data_dir"):
        """The folder is made at the first write or read; None: a database in memory. `place` names the folder in
        errors, as their reader knows it."""
        self.server: ServerLock | None = None if folder is None else ServerLock(folder)
        """Held while the database is open."""
        self._folder = folder
        self._place = place
        self._blobs: Blobs = MemoryBlobs()
        self._engine: Engine | None = None
        self._opening = threading.Lock()
        self._closed = False
        self._told = ""
        """The cause that the log has; empty where writes have gone well for `QUIET_S` since."""
        self._failed_s = 0.0
        """When a write or a read failed last, on the monotonic clock."""
        pause = partial(time.sleep, 0.0 if folder is None else sqlite.YIELD_S)
        self._writer = GroupWriter(self._transaction, self._explained, pause)

    def exists(self) -> bool:
        """Whether the folder has data; if not, reading would make an empty database."""
        try:
            if self._folder is None or self._engine is not None:
                return True
            return FILE in os.listdir(self._folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed(error) from error

    def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work`, which reads one snapshot of the database. Blocks the calling thread."""
        if self._folder is None:
            return self.write(work).result()
        try:
            with self._opened().connect() as connection:
                return work(connection)
        except (DBAPIError, OSError) as error:
            raise self._failed(error) from error

    def write(self, work: Callable[[Connection], T], tenant: str = "") -> Future[T]:
        """The future of `work`'s result, done after the commit; `work` may run twice, as in `GroupWriter.submit`.
        Tenants take turns."""
        try:
            return self._writer.submit(work, tenant)
        except RuntimeError:
            raise StorageFailed("the server is shutting down and stores nothing more") from None

    def write_blob(
        self, content: bytes, work: Callable[[Connection, str], tuple[T, Iterable[str]]], tenant: str = ""
    ) -> T:
        """Write a blob, then call `work`, which stores its name and returns a result and the names of blobs that it
        replaced; these are removed after the commit. Blocks. If `work` raises, the new blob is removed."""
        try:
            self._opened()
            blob = self._blobs.put(content)
        except (DBAPIError, OSError) as error:
            raise self._failed(error) from error
        try:
            result, unnamed = self.write(lambda connection: work(connection, blob), tenant).result()
        except Exception:
            self._blobs.remove([blob])
            raise
        self._blobs.remove(unnamed)
        return result

    def read_blob(self, find: Callable[[Connection], bytes | str | None]) -> bytes | None:
        """The content that `find` returns (bytes), or the content of the blob that it names (str). Blocks. Raises
        `FileNotFoundError` for a blob that a row names and that does not exist."""
        found = self.read(find)
        while isinstance(found, str):
            try:
                return self._blobs.get(found)
            except FileNotFoundError:
                missing, found = found, self.read(find)
                if found == missing:
                    raise
                # Another writer has replaced the blob meanwhile.
            except OSError as error:
                raise self._failed(error) from error
        return found

    def remove_blobs(self, names: Iterable[str]) -> None:
        """Remove the blobs that a committed write has replaced."""
        self._blobs.remove(names)

    def close(self) -> None:
        """Finish the submitted writes, then close. Blocks. Idempotent."""
        self._writer.close()
        with self._opening:
            self._closed = True
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.dispose()
            if self.server is not None:
                self.server.release()

    # ---- inside

    def _opened(self) -> Engine:
        with self._opening:
            if self._closed:
                raise StorageFailed("the server is shutting down and stores nothing more")
            if self._engine is None:
                self._engine = self._open_memory() if self._folder is None else self._open_folder(self._folder)
            return self._engine

    def _open_memory(self) -> Engine:
        engine = sqlite.open_engine(None)
        with sqlite.writing(engine) as connection:
            migrate(connection)
        return engine

    def _open_folder(self, folder: Path) -> Engine:
        assert self.server is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.server.hold()
        blobs = FolderBlobs(folder / BLOBS, self.server.name)
        engine = sqlite.open_engine(folder / FILE)
        try:
            with sqlite.writing(engine) as connection:
                migrate(connection)
                _sweep(connection, blobs, self.server)
            self.server.tidy()
        except BaseException:
            engine.dispose()
            raise
        self._blobs = blobs
        return engine

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with sqlite.writing(self._opened()) as connection:
            yield connection
        if self._told and time.monotonic() - self._failed_s >= QUIET_S:
            self._told = ""
            logger.warning("data is stored again in %s", self._folder)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, (DBAPIError, OSError)) and not isinstance(error, IntegrityError):
            return self._failed(error)
        return error

    def _failed(self, error: DBAPIError | OSError) -> StorageFailed:
        """The error for callers and clients. The path goes to the log, once until writes have gone well for a time: on
        a disk that is nearly full small ones do, between large ones that do not."""
        cause = sqlite.cause_of(error, self._place)
        self._failed_s = time.monotonic()
        if cause != self._told:
            self._told = cause
            logger.warning("data in %s cannot be written or read: %s", self._folder, cause)
        failed = StorageFailed(f"data cannot be written or read: {cause}")
        failed.__cause__ = error
        return failed


def _sweep(connection: Connection, blobs: FolderBlobs, server: ServerLock) -> None:
    """Remove blobs of interrupted writes, and program versions without content."""
    versions, names = program_versions.c, program_names.c
    of_programs = connection.execute(select(versions.blob, versions.tenant, versions.hash)).all()
    of_values = connection.execute(select(program_values.c.blob).where(program_values.c.blob.is_not(None))).scalars()
    lost = blobs.sweep({row.blob for row in of_programs} | set(of_values), server.is_gone)
    for blob, tenant, hash in of_programs:
        if blob in lost:
            logger.error("program %s of tenant %r has lost its content and is not served", hash[:12], tenant)
            connection.execute(delete(program_versions).where(versions.blob == blob))
            connection.execute(delete(program_names).where(names.tenant == tenant, names.hash == hash))
