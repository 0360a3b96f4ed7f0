"""The bounds of requests: their number, the size of a body, and the time to read it.

Owns admission, the refusal of requests during a drain, and the decoding of bodies to JSON values. It does not know the
fields of requests.
"""

from __future__ import annotations

import asyncio
import gc
import re
import threading
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
from weft.tokenizers.tokenizer import off_loop

T = TypeVar("T")

INLINE_DECODE_BYTES = 64 * 1024
"""Larger bodies are decoded on a thread; for smaller ones the hand-over costs more than the decoding.

The decoder holds the interpreter lock until it has decoded the whole body: 10 to 20 ms per MiB of token ids, and 0.2 s
for `MAX_CONTAINERS` lists and objects. `max_body_bytes` and `MAX_CONTAINERS` bound this time.
"""
MAX_CONTAINERS = 1 << 20
"""Of the brackets and braces that may open in a body, those within strings included: an upper bound of its lists and
objects, which take far more time and memory than their text."""
MIN_BODY_RATE = 512
"""Bytes per second: a client that sends more slowly is refused after `body_timeout_s`."""

_RUN_CONTROL = re.compile(r"/v1/runs/[^/]+(/messages|/cancel)?\Z")
_WAITS = re.compile(r"/v1/(variables/[^/]+|runs/[^/]+/(messages|events))\Z")
"""Paths whose GET waits for a value or streams events. It holds its connection meanwhile, so it counts like work."""

_LONE_SURROGATE = re.compile(
    rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)(?<!\\)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""The escape of half a pair of UTF-16, which no other half follows or precedes."""


class _CollectorPause:
    """Keeps the garbage collector from running while at least one thread decodes; restores its earlier state after.

    A decoder that makes many lists starts full collections, each of which visits all that it has made so far. The count
    is guarded by a lock: a thread that restored the state that it found could leave the collector off for ever, because
    it may have found it off on behalf of another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_decoding = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_decoding:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_decoding += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_decoding -= 1
            if not self._num_decoding and self._was_enabled:
                gc.enable()


_collector_pause = _CollectorPause()


class AdmissionMiddleware:
    """Refuses requests while the server drains or is at its limit; paths of operators are always answered."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Raises `Draining` or `Overloaded`."""
        service = self._service
        method = scope["method"] if scope["type"] == "http" else ""
        takes_work = scope["type"] == "websocket" or method == "POST"
        waits = method in ("GET", "HEAD") and _WAITS.match(scope["path"]) is not None
        # Requests that let runs end are answered until the last run has ended.
        if not (takes_work or waits) or (service.draining and _RUN_CONTROL.match(scope["path"])):
            await self._app(scope, receive, send)
            return
        if service.draining and takes_work:
            raise Draining("The server is shutting down and takes no new requests; send it to another one, or later.")
        # A drain waits for the runs and calls themselves, so it need not wait for requests that follow them.
        with service.active(record_in(scope).tenant, delays_drain=takes_work):
            await self._app(scope, receive, send)


async def read_request(request: Request, service: Service, convert: Callable[[Any], T]) -> T:
    """The body of a request, decoded and converted; on a thread if it is large.

    Raises `HttpProblem` 408, 413, 415 or 429, `InvalidRequest`, `ClientGone`, and what `convert` raises.
    """
    if content_type_of(request) != "application/json":
        raise HttpProblem(415, "The body must be JSON: send the header 'Content-Type: application/json'.")
    async with body_of(request, service) as body:
        if len(body) <= INLINE_DECODE_BYTES:
            return convert(decode(body))
        return await off_loop(lambda: convert(decode(body)), tenant=record_of(request).tenant)


def content_type_of(request: Request) -> str:
    """The content type of the body, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


@asynccontextmanager
async def body_of(request: Request, service: Service) -> AsyncIterator[bytes]:
    """The unchanged body of a request. Its bytes count against the budget until the end of the block.

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
    """Yield the parts of a body as they arrive. Raises `HttpProblem` 408 or 413, and `ClientGone`."""
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
            message = f"The body stopped for {timeout_s:g} seconds or arrived too slowly (server.body_timeout_s)."
            raise HttpProblem(408, message, headers={"connection": "close"}) from None
        if chunk is None:
            return
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


def _too_large(max_bytes: int) -> HttpProblem:
    # `Connection: close` avoids reading the rest of the body from a client that continues to send.
    message = f"The body exceeds {max_bytes} bytes, the limit of this server."
    return HttpProblem(413, message, headers={"connection": "close"})


def decode(body: bytes) -> Any:
    """Decode JSON to Python values. Raises `InvalidRequest` for invalid JSON, and for JSON that is nested too deeply or
    has more than `MAX_CONTAINERS` brackets and braces."""
    if not body:
        raise InvalidRequest("The body is empty; send a JSON object.")
    if len(body) > MAX_CONTAINERS and (opened := body.count(b"[") + body.count(b"{")) > MAX_CONTAINERS:
        raise InvalidRequest(
            f"The body has {opened:,} opening brackets and braces; this server takes at most {MAX_CONTAINERS:,}. Split "
            "it into several requests."
        )
    try:
        with _collector_pause:
            return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lone = _LONE_SURROGATE.search(body)
        if lone is not None:  # the decoder reports it as truncation
            raise InvalidRequest(
                f"The body is not valid JSON: it has half a character, {lone[0].decode()} at byte {lone.start()}, a "
                "surrogate without the other one of its pair."
            ) from None
        raise InvalidRequest(f"The body is not valid JSON in UTF-8: {error}.") from None
