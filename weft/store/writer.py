"""`GroupWriter`: group commit. One thread writes, and the writes that wait share a transaction.

Owns the order of writes (tenants take turns by the time that their writes have taken) and their outcomes, which callers
receive after the commit. A write that fails is rolled back to its own savepoint; the others of its transaction stay.
Where the database rolls a whole transaction back (a full disk), its writes are repeated in transactions of their own,
so that each has its own error. Between transactions that follow each other the writer pauses, so that other processes
can write too. `Database` owns one writer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection

from weft.threads import FairQueue

T = TypeVar("T")

MAX_GROUP = 256
"""Writes of one transaction: the first of them waits for the last."""


class _Write(NamedTuple):
    work: Callable[[Connection], Any]
    future: Future[Any]


class _Outcome(NamedTuple):
    future: Future[Any]
    result: object = None
    error: BaseException | None = None


class GroupWriter:
    """The queue of writes and the thread that commits them. Used from any thread."""

    def __init__(
        self,
        transaction: Callable[[], AbstractContextManager[Connection]],
        explained: Callable[[BaseException], BaseException],
        pause: Callable[[], object] = lambda: None,
    ):
        """`transaction` is a context that begins a transaction and commits it; `explained` converts an error of the
        database to the one that the caller receives; `pause` blocks for as long as other processes need to begin."""
        self.num_commits = 0
        self._transaction = transaction
        self._pause = pause
        self._explained = explained
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-store")
        self._lock = threading.Lock()
        self._queue: FairQueue[_Write] = FairQueue(per_tenant=1)
        self._draining = False
        """Whether the thread will look at the queue again."""

    def submit(self, work: Callable[[Connection], T], tenant: str) -> Future[T]:
        """The future of `work`'s result, done after the commit. `work` changes only the database, because it is called
        again where its transaction was lost. Raises `RuntimeError` once closed."""
        future: Future[T] = Future()
        with self._lock:
            if not self._draining:
                self._thread.submit(self._drain)
                self._draining = True
            self._queue.put(tenant, _Write(work, future))
        return future

    def close(self) -> None:
        """Finish the submitted writes; later ones are refused. Blocks. Idempotent."""
        self._thread.shutdown(wait=True)

    # ---- on the thread

    def _drain(self) -> None:
        is_first = True
        while self._goes_on():
            if not is_first:  # These writes began to wait while the previous ones were committed.
                self._pause()
            is_first = False
            begun: list[_Write] = []
            try:
                with contextlib.closing(self._waiting(begun)) as writes:
                    outcomes = self._commit(writes)
            except Exception as error:
                outcomes = self._again(begun, error)
            for future, result, failure in outcomes:
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(self._explained(failure))

    def _commit(self, writes: Iterable[_Write]) -> list[_Outcome]:
        """Carry the writes out in one transaction. Raises where it cannot begin or commit, or is rolled back."""
        with self._transaction() as connection:
            outcomes = [_attempt(connection, write) for write in writes]
        self.num_commits += 1
        return outcomes

    def _again(self, lost: list[_Write], error: Exception) -> list[_Outcome]:
        """Carry out the writes of a lost transaction, each in one of its own."""
        if not lost:  # The transaction could not begin; each of the waiting writes would wait as long again.
            return [_Outcome(write.future, error=error) for write in self._waiting(lost)]
        if len(lost) == 1:
            return [_Outcome(lost[0].future, error=error)]
        outcomes = []
        for write in lost:
            try:
                outcomes += self._commit([write])
            except Exception as own:
                outcomes.append(_Outcome(write.future, error=own))
        return outcomes

    def _waiting(self, begun: list[_Write]) -> Generator[_Write]:
        """Waiting writes, and those that arrive meanwhile. Each is added to `begun` and charged to its tenant."""
        while len(begun) < MAX_GROUP:
            with self._lock:
                taken = self._queue.take()
            if taken is None:
                return
            tenant, write = taken
            began_s = time.thread_time()
            try:
                if write.future.set_running_or_notify_cancel():
                    begun.append(write)
                    yield write
            finally:
                with self._lock:
                    self._queue.done(tenant, time.thread_time() - began_s)

    def _goes_on(self) -> bool:
        with self._lock:
            self._draining = len(self._queue) > 0
            return self._draining


def _attempt(connection: Connection, write: _Write) -> _Outcome:
    """The outcome of one write, rolled back if it failed. Raises where the whole transaction was rolled back."""
    # Through the driver: SQLAlchemy's statements cost ten times as much, and each write needs two.
    cursor = connection.connection.cursor()
    cursor.execute("SAVEPOINT one")
    try:
        result = write.work(connection)
    except BaseException as error:
        try:
            cursor.execute("ROLLBACK TO SAVEPOINT one")
        except Exception:
            raise error from None
        return _Outcome(write.future, error=error)
    cursor.execute("RELEASE SAVEPOINT one")
    return _Outcome(write.future, result)
