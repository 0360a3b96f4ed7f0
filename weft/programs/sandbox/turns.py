"""Who computes next, among guests that share the loop's thread. Used by `fibers`."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """`width` guests that compute per pass of the loop: however many there are, what else the loop has to do waits for
    their turns only. Guests that waited for their host do not queue here: they run as soon as they are answered."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._queue: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def next(self) -> None:
        """Wait for the guest's next turn."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Another loop; the one before is gone, with the tasks that waited there.
            self._loop, self._queue = loop, deque()
        turn = loop.create_future()
        self._queue.append(turn)
        if len(self._queue) == 1:
            loop.call_soon(self._admit, self._queue)
        await turn

    def _admit(self, queue: deque[asyncio.Future[None]]) -> None:
        admitted = 0
        while queue and admitted < self._width:
            turn = queue.popleft()
            # Cancelled meanwhile, otherwise.
            if not turn.done():
                turn.set_result(None)
                admitted += 1
        if queue:
            asyncio.get_running_loop().call_soon(self._admit, queue)
