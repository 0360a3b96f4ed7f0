"""Interrupts a request, at its current `await`, when its client disconnects or the drain ends.

The programs of a request release their sequences when they are closed, without waiting, so the pages are free within
one step of the interruption.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.requests import Request
from starlette.types import Receive

from weft.programs.run.runs import Run
from weft.server.errors import ClientGone
from weft.server.state import Service
from weft.workflow.service.live_run import WorkflowRun

GONE = "its client disconnected"


class Guard:
    """`async with Guard(request, service):` around all work after the body has been read.

    Raises `ClientGone` or `Draining` from the block. It reads from the connection meanwhile, so no other code may.
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
        # Without an `await` here, an interruption can only be raised inside the block.
        self._watch.cancel()
        self._registered.__exit__(None, None, None)
        ours = self._error is not None and self._task is not None and kind is asyncio.CancelledError
        # A further cancellation by the server, beside that of `interrupt`, propagates.
        if ours and self._task is not None and self._task.uncancel() == 0 and self._error is not None:
            raise self._error from None

    def interrupt(self, error: Exception) -> None:
        """Make the block raise `error` at its current `await`. Only the first call has an effect."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    async def _watch_connection(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())


async def until_over(service: Service, request: Request, run: Run | WorkflowRun, *, owned: bool = True) -> None:
    """Wait for the end of a run. Cancel it, if it is `owned`, when the client disconnects or the server interrupts the
    request."""
    try:
        async with Guard(request, service):
            await run.wait()
    except BaseException as error:
        if owned:
            run.cancel(GONE if isinstance(error, ClientGone) else "the request that started it ended")
        raise
