"""Opening the SQLite files that programs' values and records of runs are in, the same way for both.

Several processes may have one of them open: WAL lets readers and one writer work side by side, and who finds another
one writing waits for `BUSY_S`.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY_S = 10.0
_PAUSE_S = 0.02


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """A connection, which any one thread at a time may use; the file and its folder are made where they are missing.

    Every commit is durable. Raises `sqlite3.Error` and `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # What tenants keep is nobody else's; SQLite's other files take after this one.
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))
    give_up_s = time.monotonic() + BUSY_S
    while True:
        database = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            # In WAL mode anything less may lose what was committed when the machine loses power.
            database.execute("PRAGMA synchronous = FULL")
            database.execute(schema)
        except sqlite3.OperationalError as error:
            database.close()
            # SQLite does not wait for another process that is changing the file's mode, which each does at first.
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_s:
                raise
            time.sleep(_PAUSE_S)
        except BaseException:
            database.close()
            raise
        else:
            return database


@contextmanager
def writing(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction in which nobody else writes, from what is read in it to what is written. All of it is done, or
    nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
