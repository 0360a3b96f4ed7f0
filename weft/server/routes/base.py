"""The common parts of routes: access to the service, reading of a request, and responses."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.endpoints.errors import require
from weft.endpoints.fields import request_from
from weft.server.limits import read_request
from weft.server.record import record_of
from weft.server.state import Service

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

_encoder = msgspec.json.Encoder()


class RouteApp:
    """A handler as the ASGI application of a route."""

    def __init__(self, service: Service, path: str, handler: Handler):
        self._service = service
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises the errors of the handler and of the response."""
        request = Request(scope, receive)
        record = record_of(request)
        record.route = self._path
        if request.method == "POST":  # what reads a trace may have the id of the request that it is of
            self._service.traces.begin(record)
        response = await self._handler(self._service, request)
        await response(scope, receive, send)


def route(service: Service, method: str, path: str, handler: Handler) -> Route:
    """A route whose handler gets the service. Logs and metrics show its path pattern."""
    return Route(path, RouteApp(service, path, handler), methods=[method], name=f"{method} {path}")


async def read(service: Service, request: Request, kind: type[T]) -> T:
    """The request's body, checked. Raises `InvalidRequest`, `HttpProblem` and `ClientGone`."""
    body = await read_request(request, service, functools.partial(request_from, kind))
    record_of(request).mark("read")
    return body


def integer(name: str, text: str | None, default: int, least: int, most: int) -> int:
    """An integer of the query; the default where it is not given. Raises `InvalidRequest`."""
    if text is None:
        return default
    valid = text.isascii() and text.isdigit() and len(text) <= 18 and least <= int(text) <= most
    require(valid, f"{name} must be an integer from {least} to {most}.", name)
    return int(text)


def answer(value: msgspec.Struct, status: int = 200) -> Response:
    """A struct as a JSON response."""
    return Response(_encoder.encode(value), status, media_type="application/json")
