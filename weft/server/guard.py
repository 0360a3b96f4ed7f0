"""Ends a request whose client went away, or that outlasts a drain, at whatever `await` it is in.

The programs that a request runs give their sequences back when they are closed, without waiting for anything, so the
pages are free within one step of the interruption.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.requests import Request
from starlette.types import Receive

from weft.server.errors import ClientGone
from weft.server.state import Service


class Guard:
    """`async with Guard(request, service):` around everything that follows the reading of the body.

    Raises `ClientGone` or `Draining` from the block when either happens. Reads the connection while inside, so nothing
    else may.
    """

    def __init__(self, request: Request, service: Service):
        self._receive: Receive = request.receive
        self._service = service
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watch = asyncio.create_task(self._watch_connection())
        self._registered = self._service.interruptible(self.interrupt)
        self._registered.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No await in here: an interruption can then only surface inside the block.
        self._watch.cancel()
        self._registered.__exit__(None, None, None)
        ours = self._error is not None and self._task is not None and kind is asyncio.CancelledError
        # A cancellation of the server's own, on top of ours, goes on as one.
        if ours and self._task is not None and self._task.uncancel() == 0 and self._error is not None:
            raise self._error from None

    def interrupt(self, error: Exception) -> None:
        """Have the block raise `error` at its current `await`. Only the first call counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    async def _watch_connection(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())
