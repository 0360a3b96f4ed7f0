"""The outermost middleware: ids, one log line per request, errors as responses.

A log line has the method, path, status, tokens and durations; never a prompt, an output or a key.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.endpoints.record import Record
from weft.server.errors import ClientGone, HttpProblem, error_response, is_internal, problem_of
from weft.server.record import new_record
from weft.server.state import Service

logger = logging.getLogger("weft.server")
access = logging.getLogger("weft.access")

MAX_LOGGED_PATH = 200
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths that monitoring requests every few seconds; they are logged at debug level."""


class RequestMiddleware:
    """Gives each request an id and a record, converts errors to responses, and logs one line at the end."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request or a WebSocket. Errors of handlers become responses, or close a WebSocket that was accepted;
        a cancellation propagates."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        record = new_record(scope, tracing=self._service.config.trace)
        is_socket = scope["type"] == "websocket"
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            match message["type"]:
                case "http.response.start":
                    status = message["status"]
                    MutableHeaders(scope=message)["x-request-id"] = record.request_id
                case "websocket.http.response.start":
                    status = message["status"]
                case "websocket.accept":
                    status = 101
            await send(message)

        self._service.metrics.http_in_flight += 1
        try:
            await self._app(scope, receive, send_noting)
        except ClientGone:
            record.outcome = "disconnect"
        except Exception as error:
            record.outcome = "error"
            problem = _problem(error, scope, record.request_id)
            if is_internal(error) and not isinstance(error, HTTPException):
                what = "WebSocket" if is_socket else "request"
                logger.exception("%s %s failed", what, record.request_id, exc_info=error)
            if not status:
                await error_response(problem)(scope, receive, send_noting)
            elif is_socket:
                code = 1012 if problem.status == 503 else 1011 if problem.status >= 500 else 1008
                await send({"type": "websocket.close", "code": code, "reason": problem.body.message[:100]})
            else:  # the head is sent: only a broken connection can report the error to the client
                raise
        finally:
            self._service.metrics.http_in_flight -= 1
            self._finish(scope, record, status)

    def _finish(self, scope: Scope, record: Record, status: int) -> None:
        record.mark("answered")
        self._service.traces.finish(record)
        # Proxies log 499 for a client that disconnected.
        status = 499 if record.outcome == "disconnect" else status
        route = record.route or "unmatched"
        self._service.metrics.http_requests.add(_method(scope), route, str(status))
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if access.isEnabledFor(level):
            access.log(level, "request", extra={"weft": _summary(scope, record, status)})


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


def _method(scope: Scope) -> str:
    if scope["type"] == "websocket":
        return "WS"
    method: str = scope["method"]
    return method if method in _METHODS else "OTHER"


def _path(scope: Scope) -> str:
    """The path as sent, percent-encoded, so that it cannot break a log line."""
    raw: bytes = scope.get("raw_path") or b""
    return raw[:MAX_LOGGED_PATH].decode("ascii", "backslashreplace")


def _summary(scope: Scope, record: Record, status: int) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "request_id": record.request_id,
        "method": _method(scope),
        "path": _path(scope),
        "status": status,
        "seconds": round(time.monotonic() - record.started_s, 6),
    }
    optional = {
        "tenant": record.tenant,
        "model": record.model,
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "first_token_s": record.first_token_s and round(record.first_token_s, 6),
        "outcome": record.outcome if record.outcome != "ok" else "",
    }
    return summary | {name: value for name, value in optional.items() if value}


def _problem(error: Exception, scope: Scope, request_id: str) -> HttpProblem:
    if not isinstance(error, HTTPException):
        return problem_of(error, request_id)
    headers = dict(error.headers or {})
    message = str(error.detail)
    if error.status_code == 404:
        kind = "no WebSocket" if scope["type"] == "websocket" else "nothing"
        message = f"There is {kind} at {_path(scope)}; /docs lists all endpoints."
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(scope))
        message = f"{_path(scope)} takes {headers['Allow']}, not {scope['method'][:20]}."
    return HttpProblem(error.status_code, message, headers=headers)


def _methods(scope: Scope) -> list[str]:
    """All methods of the path. Each has its own route, and the router's error names only those of the first."""
    found = [route.methods for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for methods in found for method in methods or ()})
