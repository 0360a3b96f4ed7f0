"""A migration is seen whole or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from weft.store import schema
from weft.store.database import FILE, Database


def version_and_tables(folder: Path) -> tuple[int, set[str]]:
    with closing(sqlite3.connect(folder / FILE)) as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return database.execute("SELECT version FROM schema_version").fetchone()[0], names


def open_and_close(folder: Path) -> None:
    database = Database(folder)
    try:
        database.read(lambda _: None)
    finally:
        database.close()


def test_migrations_run_in_their_order_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_and_close(tmp_path)
    before, names = version_and_tables(tmp_path)
    assert before == len(schema.MIGRATIONS)
    broken = True

    def second(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE later (a INTEGER)"))

    def third(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE later ADD COLUMN b INTEGER"))
        if broken:
            raise RuntimeError("killed")

    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, second, third))
    with pytest.raises(RuntimeError):
        open_and_close(tmp_path)
    assert version_and_tables(tmp_path) == (before, names)
    broken = False
    for _ in range(2):
        open_and_close(tmp_path)
        assert version_and_tables(tmp_path) == (before + 2, names | {"later"})
    open_and_close(tmp_path / "new")
    assert version_and_tables(tmp_path / "new") == (before + 2, names | {"later"})
