"""What bounds a request: how many run at once, how large a body may be, and how it is read.

Owns admission by count, draining, and the way from a body to a decoded JSON value. It does not know fields.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.abi.errors import Draining, InvalidRequest
from weft.config import ServerConfig
from weft.server.errors import ClientGone, HttpProblem
from weft.server.record import record_in, record_of
from weft.server.state import Service

T = TypeVar("T")

INLINE_DECODE_BYTES = 64 * 1024
"""Larger bodies are decoded on a thread: up to here the hand-over costs more than the decoding.

The decoder itself keeps the interpreter, some 4 ms per MiB of token ids; `max_body_bytes` bounds that.
"""
MIN_BODY_RATE = 512
"""Bytes a second: a client that sends less does not keep its place for longer than `body_timeout_s`."""

_RUN_CONTROL = re.compile(r"/v1/runs/[^/]+(/messages|/cancel)?\Z")


class AdmissionMiddleware:
    """Refuses work while the server drains or runs as many requests as it may; operators are always answered."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `Draining` or `Overloaded`."""
        service = self._service
        takes_work = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] == "POST")
        # What a run needs in order to end is answered until the last one has.
        if not takes_work or (service.draining and _RUN_CONTROL.match(scope["path"])):
            await self._app(scope, receive, send)
            return
        if service.draining:
            raise Draining("The server is shutting down and takes no new requests; send it to another one, or later.")
        with service.active(record_in(scope).tenant):
            await self._app(scope, receive, send)


async def read_request(request: Request, service: Service, convert: Callable[[Any], T]) -> T:
    """The body of a request, decoded and converted; both on a thread where it is large.

    Raises `HttpProblem` 408, 413, 415 or 429, `InvalidRequest`, `ClientGone`, and what `convert` raises.
    """
    if content_type_of(request) != "application/json":
        raise HttpProblem(415, "The body must be JSON: send the header 'Content-Type: application/json'.")
    async with body_of(request, service) as body:
        if len(body) <= INLINE_DECODE_BYTES:
            return convert(decode(body))
        return await asyncio.get_running_loop().run_in_executor(None, lambda: convert(decode(body)))


def content_type_of(request: Request) -> str:
    """What the body is said to be, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


@asynccontextmanager
async def body_of(request: Request, service: Service) -> AsyncIterator[bytes]:
    """The body of a request as it is; its bytes count as held until the end of the block.

    Raises `HttpProblem` 408, 413, 415 or 429, and `ClientGone`.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "Compressed bodies are not accepted: send the body without Content-Encoding."
        raise HttpProblem(415, message, headers={"accept-encoding": "identity"})
    record, taken, chunks = record_of(request), 0, []
    try:
        async with aclosing(_chunks(request, service.config)) as received:
            async for chunk in received:
                service.bodies.take(record.tenant, len(chunk))
                taken += len(chunk)
                chunks.append(chunk)
        record.body_bytes = taken
        yield chunks[0] if len(chunks) == 1 else b"".join(chunks)
    finally:
        service.bodies.give_back(record.tenant, taken)


async def _chunks(request: Request, config: ServerConfig) -> AsyncGenerator[bytes, None]:
    """The parts of a body as they arrive. Raises `HttpProblem` 408 or 413, and `ClientGone`."""
    max_bytes, timeout_s = config.max_body_bytes, config.body_timeout_s
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    size, stream = 0, request.stream()
    while True:
        try:
            slowest_s = began_s + size / MIN_BODY_RATE
            async with asyncio.timeout_at(min(loop.time(), slowest_s) + timeout_s):
                chunk = await anext(stream, None)
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            message = f"The body stopped coming for {timeout_s:g} seconds, or came too slowly (server.body_timeout_s)."
            raise HttpProblem(408, message, headers={"connection": "close"}) from None
        if chunk is None:
            return
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


def _too_large(max_bytes: int) -> HttpProblem:
    # Closing keeps a client that goes on sending from being read to the end.
    message = f"The body exceeds {max_bytes} bytes, the limit of this server."
    return HttpProblem(413, message, headers={"connection": "close"})


def decode(body: bytes) -> Any:
    """JSON as Python values. Raises `InvalidRequest` for anything that is not JSON, or is nested too deeply."""
    if not body:
        raise InvalidRequest("The body is empty; send a JSON object.")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # A lone surrogate is reported as truncation by the decoder, hence the general wording.
        raise InvalidRequest(f"The body is not valid JSON in UTF-8: {error}.") from None
