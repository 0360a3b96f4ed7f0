"""Take-over of the formats of earlier versions: folders of programs, `runs.sqlite` and `store.sqlite`.

Their rows are copied in the transaction that makes the tables, and contents become blobs by hard links. So a kill
before the commit leaves the old files as they were, and after it the new form is complete. Old files are removed after
the commit, from a list that is committed with the rows; if the process is killed meanwhile, the next opening removes
them. Damaged files stay in place and are logged.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, TableClause, column, delete, insert, inspect, select, table
from sqlalchemy.exc import DBAPIError

from weft.abi.errors import StorageFailed
from weft.store import sqlite
from weft.store.blobs import FolderBlobs
from weft.store.schema import leftovers, program_names, program_values, program_versions, runs, value_usage
from weft.store.servers import is_free

_PROGRAMS, _RUNS, _VALUES = "programs", "runs.sqlite", "store.sqlite"
OLD = (_PROGRAMS, _RUNS, _VALUES)
"""Their names in the folder."""
_RUNS_FORMAT = 1
_ROWS = 500
"""Read and written at once."""

_old_runs = table("program_runs", column("id"), column("owner"), column("created_s"), column("record"))
_old_values = table("program_values", column("tenant"), column("name"), column("value"))

logger = logging.getLogger("weft.store")


class _UnknownFormat(Exception):
    pass


class _OldVersion(msgspec.Struct):
    hash: str
    kind: str
    size_bytes: int
    created_s: float


class _OldIndex(msgspec.Struct):
    """`index.json` of a tenant."""

    versions: dict[str, _OldVersion]
    names: dict[str, list[str]]


def take_over(connection: Connection, folder: Path, blobs: FolderBlobs) -> None:
    """Copy the data of earlier versions into empty tables. Raises `StorageFailed` while a server of an earlier version
    runs, `OSError` and `DBAPIError`; the caller then rolls back."""
    for path in folder.glob(f"{_RUNS}.*.lock"):
        if not is_free(path):
            raise StorageFailed(
                "a server of an earlier version of Weft uses programs.data_dir: stop it, then try again"
            )
        _remove_later(connection, path.name)
    for path in sorted((folder / _PROGRAMS).glob("*/tenant")):
        if _take_programs(connection, path.parent, blobs):
            _remove_later(connection, f"{_PROGRAMS}/{path.parent.name}")
    blobs.sync()
    for name, take in ((_RUNS, _take_runs), (_VALUES, _take_values)):
        if (folder / name).exists() and _take_file(connection, folder / name, take):
            for suffix in ("", "-wal", "-shm"):
                _remove_later(connection, name + suffix)


def remove_leftovers(engine: Engine, folder: Path) -> None:
    """Remove old files that were taken over. Files that cannot be removed now stay on the list."""
    with engine.connect() as connection:
        names = connection.execute(select(leftovers.c.path)).scalars().all()
    if not names:
        return
    for name in names:
        path = folder / name
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / _PROGRAMS).rmdir()
    gone = [name for name in names if not (folder / name).exists()]
    try:
        with sqlite.writing(engine) as connection:
            connection.execute(delete(leftovers).where(leftovers.c.path.in_(gone)))
    except DBAPIError as error:  # The data is complete; the next opening removes the list.
        logger.warning("the list of old files in %s cannot be shortened: %s", folder, error.orig)


def _remove_later(connection: Connection, name: str) -> None:
    connection.execute(insert(leftovers).values(path=name))


def _take_programs(connection: Connection, folder: Path, blobs: FolderBlobs) -> bool:
    """Copy the programs of one tenant; False where their index is damaged."""
    tenant = (folder / "tenant").read_text(encoding="utf-8")
    try:
        index = msgspec.json.decode((folder / "index.json").read_bytes(), type=_OldIndex)
    except FileNotFoundError:
        return True
    except msgspec.MsgspecError as error:
        logger.error("the programs of tenant %r in %s cannot be read and are not served: %s", tenant, folder, error)
        return False
    found = set()
    for version in index.versions.values():
        try:
            blob = blobs.adopt(folder / f"{version.hash}.program")
        except FileNotFoundError:
            logger.error("program %s of tenant %r has lost its content and is not served", version.hash[:12], tenant)
            continue
        found.add(version.hash)
        row = msgspec.structs.asdict(version) | {"tenant": tenant, "blob": blob}
        connection.execute(insert(program_versions), row)
    for name, hashes in index.names.items():
        for position, hash in enumerate(hashes):
            if hash in found:
                row = {"tenant": tenant, "name": name, "hash": hash, "position": position}
                connection.execute(insert(program_names), row)
    return True


def _take_file(connection: Connection, path: Path, take: Callable[[Connection, Connection], None]) -> bool:
    """Copy the rows of one file, all or none; False where it is damaged or of an unknown format."""
    engine = sqlite.open_engine(path)
    try:
        with engine.connect() as old, _all_or_none(connection):
            take(connection, old)
    except DBAPIError as error:
        if not sqlite.is_damage(error):
            raise
        reason: object = error.orig
    except _UnknownFormat as error:
        reason = error
    else:
        return True
    finally:
        engine.dispose()
    logger.error("%s cannot be read, is not taken over and stays as it is: %s", path, reason)
    return False


@contextlib.contextmanager
def _all_or_none(connection: Connection) -> Iterator[None]:
    """A savepoint. On a full disk SQLite rolls the whole transaction back, and the savepoint is gone: the error that is
    raised is the disk's, not that of the missing savepoint."""
    savepoint = connection.begin_nested()
    try:
        yield
    except BaseException:
        with contextlib.suppress(DBAPIError):
            savepoint.rollback()
        raise
    savepoint.commit()


def _take_runs(connection: Connection, old: Connection) -> None:
    if (found := sqlite.user_version(old)) > _RUNS_FORMAT:
        raise _UnknownFormat(f"its format is {found}; this version reads {_RUNS_FORMAT}")
    for rows in _rows(old, _old_runs):
        connection.execute(insert(runs), [{**row, "server": row["owner"]} for row in rows])


def _take_values(connection: Connection, old: Connection) -> None:
    used: dict[str, int] = {}
    for rows in _rows(old, _old_values):
        for row in rows:
            row["size_bytes"] = len(row["name"].encode()) + len(row["value"])
            used[row["tenant"]] = used.get(row["tenant"], 0) + row["size_bytes"]
        connection.execute(insert(program_values), rows)
    for tenant, size_bytes in used.items():
        connection.execute(insert(value_usage), {"tenant": tenant, "size_bytes": size_bytes})


def _rows(old: Connection, of: TableClause) -> Iterator[list[dict[str, Any]]]:
    """Rows in parts; none where a server was killed before it had made the table."""
    if inspect(old).has_table(of.name):
        for rows in old.execute(select(of)).mappings().partitions(_ROWS):
            yield [dict(row) for row in rows]
