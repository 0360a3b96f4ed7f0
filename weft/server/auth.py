"""API keys, which identify the tenant of a request.

The middleware wraps the router, so that no spelling of a path reaches a handler without a key: it compares the same
string that the router matches. Keys are kept as digests. Every request is compared with every digest in constant time,
so that timing reveals neither a key nor a near match.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server.api_keys import ApiKey, find_tenant
from weft.server.errors import HttpProblem
from weft.server.record import record_in

OPEN_PATHS = frozenset({"/", "/docs", "/health", "/openapi.json", "/ready", "/version"})
"""Paths answered without a key: probes of load balancers, and documentation, which has no secrets. `/metrics` needs a
key, because it shows the server's activity."""


class AuthMiddleware:
    """Refuses requests without a valid key, and sets the tenant in the record of all others."""

    def __init__(self, app: ASGIApp, keys: list[ApiKey]):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Raises `HttpProblem` 401, which the outer middleware answers."""
        if self._keys and scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS:
            tenant = find_tenant(self._keys, _presented(scope))
            if tenant is None:
                raise HttpProblem(
                    401,
                    "No valid API key: send the header 'Authorization: Bearer <key>'.",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            record_in(scope).tenant = tenant
        await self._app(scope, receive, send)


def _presented(scope: Scope) -> bytes:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values and scope["type"] == "websocket":
        # A browser cannot set headers of a WebSocket request.
        given = parse_qs(scope["query_string"].decode("latin-1")).get("api_key", [])
        return given[0].encode() if len(given) == 1 else b""
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].partition(b" ")
    return bytes(key.strip()) if scheme.lower() == b"bearer" else b""
