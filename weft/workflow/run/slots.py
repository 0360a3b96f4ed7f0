"""`RowSlots`: a bounded number of slots, given to the earliest row that waits.

Rows then end one after the other, and few hold the values of functions that their later functions need.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RowSlots:
    """Used from one event loop."""

    def __init__(self, count: int):
        self._num_free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap of (row, order of arrival, what gets a slot)."""
        self._numbers = itertools.count()

    @asynccontextmanager
    async def of(self, row: int) -> AsyncIterator[None]:
        """Hold a slot for a row while the block runs."""
        if self._num_free:
            self._num_free -= 1
        else:
            slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (row, next(self._numbers), slot))
            try:
                await slot
            except asyncio.CancelledError:
                if slot.done() and not slot.cancelled():  # it was given the slot at the same time
                    self._hand_on()
                raise
        try:
            yield
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            _, _, slot = heapq.heappop(self._waiting)
            if not slot.done():
                slot.set_result(None)
                return
        self._num_free += 1
