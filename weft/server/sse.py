"""Responses of server-sent events.

The head is sent with the first chunk, so that an earlier error can still set the status; or with the first comment,
which shows proxies that a stream without events is alive. Chunks are pulled: while the client reads slowly, `send`
waits, tokens accumulate in the program's operations (an integer each, at most as many as the request may generate), and
the next chunk carries all of them. This module queues nothing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from weft.endpoints.writers import StreamEvents
from weft.server.errors import ClientGone, error_json, is_internal, problem_of
from weft.server.guard import Guard
from weft.server.record import record_of
from weft.server.state import Service
from weft.tokenizers.tokenizer import off_loop

logger = logging.getLogger("weft.server")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Disables the buffering of proxies, which would delay the events.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


class EventStream:
    """A response of server-sent events. Owns the head, the keep-alive comments, and the event of an error.

    Subclasses write the events (`_produce`) and handle the end of the response, with or without an error (`_close`).
    """

    def __init__(self, request: Request, service: Service):
        self._request = request
        self._service = service
        self._started = False
        self._writing = asyncio.Lock()
        """Held while the head is sent, and while a comment is written."""
        self._num_sending = 0
        """Events that are being sent without the lock."""
        self._written_s = service.timer.now()

    async def _produce(self, send: Send) -> None:
        """Write every event."""
        raise NotImplementedError

    def _close(self, failure: BaseException | None) -> None:
        """Handle the end of the response; `failure` is None for a complete one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises errors before the head is sent, and `ClientGone`."""
        failure: BaseException | None = None
        try:
            async with Guard(self._request, self._service):
                with self._kept_alive(send):
                    await self._produce(send)
        except Exception as error:
            failure = error
            if not self._started or isinstance(error, ClientGone):
                raise
            await self._tell(send, error)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._close(failure)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, events: bytes) -> None:
        if not events:
            return
        self._service.metrics.stream_writes += 1
        if not self._started or self._writing.locked():
            async with self._writing:
                await self._write(send, events)
            return
        # The lock costs four calls for every event, and only a comment can be in the way.
        self._num_sending += 1
        try:
            await self._write(send, events)
        finally:
            self._num_sending -= 1

    async def _write(self, send: Send, lines: bytes) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            self._started = True
        await send({"type": "http.response.body", "body": lines, "more_body": True})
        self._written_s = self._service.timer.now()

    @contextmanager
    def _kept_alive(self, send: Send) -> Iterator[None]:
        """Send comments while no event is written."""
        interval_s = self._service.config.stream_keep_alive_s
        if not interval_s:
            yield
            return
        task = asyncio.create_task(self._comment(send, interval_s))
        try:
            yield
        finally:
            task.cancel()  # the task may be at any `await`; it writes nothing after this line

    async def _comment(self, send: Send, interval_s: float) -> None:
        timer = self._service.timer
        while True:
            async with self._writing:
                # Behind an event that the client has not read, a comment has no use.
                if self._num_sending:
                    self._written_s = timer.now()
                elif timer.now() - self._written_s >= interval_s:
                    await self._write(send, COMMENT)
                due_s = self._written_s + interval_s
            await timer.sleep(due_s - timer.now())

    async def _tell(self, send: Send, error: Exception) -> None:
        """Send an error after the head as the last event. `[DONE]` does not follow, since the stream is incomplete."""
        record = record_of(self._request)
        record.outcome = "error"
        if is_internal(error):
            logger.exception("request %s failed while streaming", record.request_id, exc_info=error)
        body = error_json(problem_of(error, record.request_id))
        await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n", "more_body": True})


class AnswerStream(EventStream):
    """A stream of a request's events. Always closes their source."""

    def __init__(self, request: Request, service: Service, events: AsyncGenerator[StreamEvents, None]):
        super().__init__(request, service)
        self._events = events

    async def _produce(self, send: Send) -> None:
        async with aclosing(self._events):
            async for events in self._events:
                if events.is_long:
                    tenant = record_of(self._request).tenant
                    lines = await off_loop(functools.partial(_lines, events), tenant=tenant)
                else:
                    lines = _lines(events)
                if lines:
                    await self._send(send, lines)
            await self._send(send, DONE)


def _lines(events: StreamEvents) -> bytes:
    lines = b""
    for value in events.values:
        lines += b"data: %b\n\n" % _encode(value)
    return lines
