"""What the families share: how a route finds the service, reads its request, and answers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.core.errors import InvalidRequest
from weft.server.fields import request_from
from weft.server.limits import read_request
from weft.server.record import record_of
from weft.server.state import Service

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

_encoder = msgspec.json.Encoder()


def route(service: Service, method: str, path: str, handler: Handler) -> Route:
    """A route whose handler gets the service, and whose pattern is what logs and metrics say."""

    async def endpoint(request: Request) -> ASGIApp:
        record = record_of(request)
        record.route = path
        service.traces.begin(record)
        return await handler(service, request)

    # Starlette calls what an endpoint returns as an ASGI application; its types name the one class that it ships.
    return Route(path, endpoint, methods=[method], name=f"{method} {path}")


async def read(service: Service, request: Request, kind: type[T]) -> T:
    """The request's body, checked. Raises `InvalidRequest`, `HttpProblem` and `ClientGone`."""
    body = await read_request(request, service.config.max_body_bytes, functools.partial(request_from, kind))
    record_of(request).mark("read")
    return body


def answer(value: msgspec.Struct, status: int = 200) -> Response:
    """A struct as a JSON response."""
    return Response(_encoder.encode(value), status, media_type="application/json")


def require(condition: bool, message: str, param: str) -> None:
    """Raise `InvalidRequest` about `param` unless the condition holds."""
    if not condition:
        raise InvalidRequest(message, param)
