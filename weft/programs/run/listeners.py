"""`Listener`: a reader of the messages of one run.

Owns the unread messages and their bound: a reader that falls behind is disconnected, without an effect on others.
`weft.programs.run.runs` creates and feeds it. Used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from weft.abi.errors import SlowListener, WeftError

LISTENER_MESSAGES = 2000
"""Most unread messages of a listener; more disconnect it."""
LISTENER_BYTES = 8 << 20


class Listener:
    """Iterates over one run's messages: `async for message in run.messages()`. `close` it unless it is read to its end.

    The iteration ends with the run. It raises `SlowListener` if too many messages were unread.
    """

    def __init__(self, run_id: str, kept: list[bytes], missed: int, on_close: Callable[[Listener], None]):
        self.missed = missed
        """Number of earlier messages that were no longer kept."""
        self._run_id = run_id
        self._on_close = on_close
        self._waiting = deque(kept)
        self._bytes = sum(map(len, kept))
        self._news = asyncio.Event()
        self._done = False
        self._error: WeftError | None = None
        if kept:
            self._news.set()

    def put(self, message: bytes) -> bool:
        """Take a message. Returns False if the listener is disconnected instead."""
        if len(self._waiting) >= LISTENER_MESSAGES or self._bytes + len(message) > LISTENER_BYTES:
            self._waiting.clear()
            self.end(SlowListener(f"What the run {self._run_id} says was not read fast enough; attach again."))
            return False
        self._waiting.append(message)
        self._bytes += len(message)
        self._news.set()
        return True

    def end(self, error: WeftError | None) -> None:
        """End the iteration, with `error` if given, after the unread messages."""
        self._done, self._error = True, error
        self._news.set()

    def close(self) -> None:
        """Stop listening and drop unread messages."""
        self._on_close(self)
        self._waiting.clear()
        self.end(None)

    def take(self) -> bytes | None:
        """The next unread message, or None. Never waits."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while True:
            message = self.take()
            if message is not None:
                return message
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
