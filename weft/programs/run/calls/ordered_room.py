"""`OrderedRoom`: work that waits, in order, until it fits with what is under way, by number and by bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OrderedRoom:
    """Room for `most` pieces of work that hold `most_bytes` together. Used from one event loop."""

    def __init__(self, most: int, most_bytes: int):
        self._left, self._left_bytes = most, most_bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Have room for as long as the block runs; `num_bytes` must fit where nothing else is under way."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, num_bytes))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._left += 1
                self._left_bytes += num_bytes
            # One that gave up while it waited may have been in the way of a smaller one.
            turn.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, num_bytes = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self._left > 0 and num_bytes <= self._left_bytes:
                self._waiting.popleft()
                self._left -= 1
                self._left_bytes -= num_bytes
                turn.set_result(None)
            else:
                return
