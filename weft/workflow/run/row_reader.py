"""`RowReader`: reads the rows of an iterator on a thread, so that an iterator that takes long holds up its rows alone.

Owns the thread. All rows are read on the same one: what an iterator uses, such as a cursor of SQLite, may belong to a
thread. Rows are read as far as they are wanted, and no further.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any

NumberedRow = tuple[int, Mapping[str, Any]]
GATHER_S = 0.02
"""For so long rows are gathered before the first of them is handed on, unless all that are wanted are there: a row at a
time would cost a fast iterator a change of threads each, and its first plan all rows but one."""


class RowReader(Iterator[NumberedRow]):
    """The rows that were read by now; the end, or the error, of the iterator comes behind them. Used from one event
    loop, except by its own thread."""

    def __init__(self, rows: Iterator[NumberedRow]):
        self.is_waiting = False
        """Whether a row was asked for and is not there."""
        self._rows = rows
        self._read: deque[NumberedRow | BaseException | None] = deque()
        """None at the end."""
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Numbers of further rows to be read; 0: no further one."""
        self._num_unread = 0
        """Rows that are wanted and were not taken."""
        self._tells_each = False
        """Whether the thread is to tell the loop as soon as it has a row."""
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """None before the first row is asked for."""
        self._timer: asyncio.TimerHandle | None = None
        self._on_row: Callable[[], None] = lambda: None

    @property
    def has_next(self) -> bool:
        """Whether `next` has a row, the end or an error."""
        return bool(self._read)

    def ask(self, num_rows: int, on_row: Callable[[], None]) -> None:
        """Read so many rows, where there is none; `on_row` is called once some are there."""
        self.is_waiting, self._tells_each, self._on_row = True, False, on_row
        more, self._num_unread = num_rows - self._num_unread, max(num_rows, self._num_unread)
        if more > 0:
            self._wanted.put(more)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self._run, self._loop), name="weft-rows", daemon=True).start()
        self._timer = self._loop.call_later(GATHER_S, self._gathered)

    def __next__(self) -> NumberedRow:
        """A row that is there. Raises what the iterator raised."""
        found = self._read.popleft()
        if found is None:
            raise StopIteration
        if isinstance(found, BaseException):
            raise found
        self._num_unread -= 1
        return found

    def close(self) -> None:
        """Read no further row. The thread ends when the iterator returns, for which nothing waits."""
        self._is_closed = True
        self._wanted.put(0)
        if self._timer is not None:
            self._timer.cancel()

    def _gathered(self) -> None:
        self._tells_each = True
        self._told()

    def _told(self) -> None:
        if self.is_waiting and self._read:
            self.is_waiting = False
            if self._timer is not None:
                self._timer.cancel()
            self._on_row()

    # ---- on the thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop was closed, and nothing takes a row any more
            self._read_all(loop)
        if isinstance(self._rows, Generator):
            self._rows.close()  # what it has open would wait for the garbage collector

    def _read_all(self, loop: asyncio.AbstractEventLoop) -> None:
        left = 0
        while (left := left or self._wanted.get()) and not self._is_closed:
            left -= 1
            found = self._next()
            self._read.append(found)
            is_last = not isinstance(found, tuple)
            if is_last or not left or self._tells_each:
                loop.call_soon_threadsafe(self._told)
            if is_last:
                return

    def _next(self) -> NumberedRow | BaseException | None:
        try:
            return next(self._rows, None)
        except BaseException as error:
            return error
