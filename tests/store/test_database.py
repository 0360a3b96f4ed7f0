"""One thread that writes for all: shared commits, errors that stay alone, readers that do not wait, clear failures."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection, event, func, insert, select
from sqlalchemy.exc import IntegrityError, OperationalError

from tests.small_disk import fill, small_disk
from weft.abi.errors import QuotaExceeded, StorageFailed
from weft.store import sqlite
from weft.store.database import FILE, Database
from weft.store.schema import value_usage
from weft.store.writer import MAX_GROUP

Work = Callable[[Connection], object]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "data")
    yield made
    made.close()


@contextmanager
def waiting(database: Database) -> Iterator[None]:
    """Whatever is submitted inside waits for a write that ends with it, so that all of it is one group."""
    begun, go = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        begun.set()
        go.wait(30)

    held = database.write(hold, "holder")
    assert begun.wait(30)
    try:
        yield
    finally:
        go.set()
        held.result()


def put(tenant: str, size: int = 1) -> Work:
    return lambda connection: connection.execute(insert(value_usage).values(tenant=tenant, size_bytes=size))


def put_large(connection: Connection) -> None:
    put("x" * 1_000_000)(connection)


def tenants(database: Database) -> set[str]:
    return database.read(lambda connection: set(connection.execute(select(value_usage.c.tenant)).scalars()))


def on_disk(database: Database) -> int:
    with closing(sqlite3.connect(database._folder / FILE)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM value_usage").fetchone()[0])


def test_writes_that_wait_share_one_commit_and_are_told_after_it(database: Database) -> None:
    database.write(put("first")).result()
    before = database._writer.num_commits
    seen: list[int] = []
    with waiting(database), ThreadPoolExecutor(8) as threads:
        writes = list(threads.map(lambda number: database.write(put(f"{number:03}")), range(100)))
        for write in writes:
            write.add_done_callback(lambda _: seen.append(on_disk(database)))
        assert on_disk(database) == 1
    wait(writes)
    assert database._writer.num_commits == before + 1
    database.write(put("last")).result()
    assert seen == [101] * 100


def test_a_write_fails_alone(database: Database) -> None:
    def over(connection: Connection) -> None:
        put("never")(connection)
        raise QuotaExceeded("too much")

    with waiting(database):
        writes = [database.write(work) for work in (put("a"), put("a"), over, put("b"), lambda _: 1 // 0)]
    wait(writes)
    assert [type(write.exception()) for write in writes] == [
        type(None),
        IntegrityError,
        QuotaExceeded,
        type(None),
        ZeroDivisionError,
    ]
    assert tenants(database) == {"a", "b"}
    assert database._writer.num_commits == 1


def test_a_full_disk_fails_what_does_not_fit_and_nothing_else(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pages = "PRAGMA max_page_count = {}"
    database.write(lambda connection: connection.exec_driver_sql(pages.format(60))).result()
    with waiting(database):
        writes = [database.write(work) for work in (put("a"), put_large, put("b"), put_large, put("c"))]
    wait(writes)
    failed = [write.exception() for write in writes]
    assert [type(error) for error in failed] == [type(None), StorageFailed, type(None), StorageFailed, type(None)]
    assert "the disk is full" in str(failed[1])
    assert str(database._folder) not in str(failed[1])
    assert tenants(database) == {"a", "b", "c"}
    told = [record.message for record in caplog.records if str(database._folder) in record.message]
    assert len([one for one in told if "disk is full" in one]) <= 2
    database.write(lambda connection: connection.exec_driver_sql(pages.format(100_000))).result()
    database.write(put_large).result()


def test_a_commit_that_fails_is_tried_again_for_each_write(database: Database) -> None:
    database.write(put("first")).result()
    failures = [OperationalError("COMMIT", None, sqlite3.OperationalError("disk I/O error"))]

    def fail(_: Connection) -> None:
        if failures:
            raise failures.pop()

    event.listen(database._opened(), "commit", fail)
    with waiting(database):
        writes = [database.write(work) for work in (put("a"), put("b"), put("b"))]
    wait(writes)
    assert not failures
    assert [type(write.exception()) for write in writes] == [type(None), type(None), IntegrityError]
    assert tenants(database) == {"first", "a", "b"}


def test_a_busy_database_is_told_of_once_and_to_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.0)
    database = Database(tmp_path)
    database.write(put("first")).result()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        writes = [database.write(put(name)) for name in "abc"]
        wait(writes)
        for write in writes:
            with pytest.raises(StorageFailed, match=r"another server has been writing.*try again"):
                write.result()
    assert tenants(database) == {"first"}
    other.close()
    database.write(put("a")).result()
    assert "stored again" not in caplog.text, "it may fail again at once"
    monkeypatch.setattr("weft.store.database.QUIET_S", 0.0)
    database.write(put("b")).result()
    assert (caplog.text.count("cannot be written or read"), caplog.text.count("stored again")) == (1, 1)
    database.close()


def test_a_transaction_begins_soon_after_that_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 1.0)
    database = Database(tmp_path)
    database.write(put("first")).result()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.execute("COMMIT")

    monkeypatch.setattr(sqlite, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    database.write(put("second")).result()
    assert len(pauses) == 3
    assert max(pauses) < sqlite.YIELD_S
    other.close()
    database.close()


def test_another_process_can_write_between_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Database(tmp_path), Database(tmp_path)
    order: list[str] = []

    def noted(name: str) -> Work:
        def work(connection: Connection) -> None:
            put(name)(connection)
            order.append(name)

        return work

    monkeypatch.setattr(one._writer, "_pause", lambda: two.write(noted("other")).result())
    later: list[Future[object]] = []
    with waiting(one):
        first = one.write(noted("first"))
        first.add_done_callback(lambda _: later.append(one.write(noted("second"))))
    wait([first])
    one.close()
    assert later[0].exception() is None
    assert order == ["first", "other", "second"]
    two.close()


@pytest.mark.parametrize("left", [0, 1, 2, 4, 6], ids=lambda pages: f"{pages} pages left")
def test_a_disk_that_is_full_from_the_start_is_named_until_it_has_room(tmp_path: Path, left: int) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        filler = fill(disk, left * 4096)
        with closing(Database(disk / "data")) as database:
            for _ in range(2):
                with pytest.raises(StorageFailed, match=r"the disk is full; free space.*programs\.data_dir"):
                    tenants(database)
                with pytest.raises(StorageFailed, match=r"the disk is full; free space.*programs\.data_dir"):
                    database.write(put("a")).result()
            filler.unlink()
            database.write(put("a")).result()
            assert tenants(database) == {"a"}


def test_readers_wait_for_no_writer_and_see_one_state(database: Database) -> None:
    database.write(put("first")).result()

    def look(connection: Connection) -> tuple[int, int]:
        count = select(func.count()).select_from(value_usage)
        before = connection.execute(count).scalar_one()
        database.write(put("second")).result()
        return before, connection.execute(count).scalar_one()

    with waiting(database):
        write = database.write(put("third"))
        assert tenants(database) == {"first"}
    write.result()
    assert database.read(look) == (2, 2)
    assert tenants(database) == {"first", "second", "third"}


def test_a_tenant_that_writes_much_does_not_keep_others_waiting(database: Database) -> None:
    commits: list[int] = []
    with waiting(database):
        many = [database.write(put(f"{number}"), "a") for number in range(2 * MAX_GROUP)]
        one = database.write(put("one"), "b")
        one.add_done_callback(lambda _: commits.append(database._writer.num_commits))
    wait([one, *many])
    assert commits == [1]
    assert database._writer.num_commits == 3


def test_a_write_that_was_cancelled_does_not_begin(database: Database) -> None:
    with waiting(database):
        given_up, other = database.write(put("a")), database.write(put("b"))
        assert given_up.cancel()
    other.result()
    with pytest.raises(CancelledError):
        given_up.result()
    assert tenants(database) == {"b"}


def test_threads_that_write_what_they_have_read_lose_nothing(database: Database) -> None:
    database.write(put("sum", 0)).result()

    def add(connection: Connection) -> None:
        found = connection.execute(select(value_usage.c.size_bytes)).scalar_one()
        connection.execute(value_usage.update().values(size_bytes=found + 1))

    def write_many(_: int) -> None:
        for number in range(25):
            written: Future[None] = database.write(add, f"{number % 3}")
            written.result()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write_many, range(8)))
    assert database.read(lambda connection: connection.execute(select(value_usage.c.size_bytes)).scalar_one()) == 200


def test_what_was_submitted_is_written_before_closing(tmp_path: Path) -> None:
    database = Database(tmp_path)
    with waiting(database):
        writes = [database.write(put(f"{number}")) for number in range(10)]
        closing = threading.Thread(target=database.close)
        closing.start()
    closing.join()
    assert all(write.exception() is None for write in writes)
    assert on_disk(database) == 10
    for call in (lambda: database.write(put("late")), lambda: database.read(lambda _: None)):
        with pytest.raises(StorageFailed, match="shutting down"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


def test_a_write_that_fails_keeps_no_blob(database: Database) -> None:
    def refuse(connection: Connection, blob: str) -> tuple[None, list[str]]:
        raise QuotaExceeded("too much")

    with pytest.raises(QuotaExceeded):
        database.write_blob(b"content", refuse)
    assert list((database._folder / "blobs").iterdir()) == []


def test_a_blob_that_is_replaced_while_it_is_read_is_found(database: Database) -> None:
    names = [database.write_blob(content, lambda _, blob: (blob, [])) for content in (b"old", b"new")]
    database.remove_blobs(names[:1])
    found = iter(names)
    assert database.read_blob(lambda _: next(found)) == b"new"
    with pytest.raises(FileNotFoundError):
        database.read_blob(lambda _: names[0])


def test_in_memory() -> None:
    database = Database()
    database.write(put("a")).result()
    blob = database.write_blob(b"content", lambda _, blob: (blob, []))
    assert (tenants(database), database.read_blob(lambda _: blob)) == ({"a"}, b"content")
    database.close()


@pytest.mark.parametrize("why", ["newer", "damaged", "no folder", "read-only"])
def test_a_database_that_cannot_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    folder, match = tmp_path / "data", "newer version of Weft"
    if why == "no folder":
        folder.write_text("")
        match = "writable"
    else:
        database = Database(folder)
        database.write(put("a")).result()
        database.close()
    with sqlite3.connect(tmp_path / "copy" if why == "no folder" else folder / FILE) as connection:
        if why == "newer":
            connection.execute("UPDATE schema_version SET version = 99")
    if why == "damaged":
        (folder / FILE).write_bytes(b"nonsense" * 1000)
        match = "damaged; restore"
    if why == "read-only":
        monkeypatch.setattr("weft.store.servers.os.open", _refuse)
        match = "writable"
    for _ in range(2):
        unusable = Database(folder)
        with pytest.raises(StorageFailed, match=match) as raised:
            unusable.write(put("b")).result()
        assert str(tmp_path) not in str(raised.value)
        with pytest.raises(StorageFailed, match=match):
            tenants(unusable)
        unusable.close()
    assert caplog.text.count("cannot be written or read") == (0 if why == "newer" else 2)


def _refuse(*args: object) -> int:
    raise PermissionError(13, "Permission denied", "/the/server's/path")
