"""Turns of the event loop, for work that is done in parts while others wait."""

from __future__ import annotations

import asyncio
from collections import deque


class LoopTurns:
    """Turns of an event loop, one in each pass, by tenant. Used from one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, in the order of their turns; no tenant has an empty one."""
        self._next: asyncio.Handle | None = None

    async def next(self, tenant: str) -> None:
        """Wait for a turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._next = None
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other tenants
            if not turn.done():  # otherwise its run was cancelled
                turn.set_result(None)
                break
        if self._waiting:
            self._schedule()
