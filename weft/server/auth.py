"""API keys: who a request belongs to.

A pure ASGI middleware around everything, routing included, so that no spelling of a path reaches a handler without a
key. It compares the very string that the router matches. Keys are kept as digests; every digest is compared on every
request, in constant time, so that timing tells neither a key nor which one nearly matched.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.abi.errors import ConfigError
from weft.server.errors import HttpProblem
from weft.server.record import record_in

OPEN_PATHS = frozenset({"/", "/docs", "/health", "/openapi.json", "/ready", "/version"})
"""Answered without a key: probes of load balancers, and documentation, which has no secret. `/metrics` is not among
them: it shows what a server does."""

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}\Z")


class ApiKey(NamedTuple):
    """A key's digest, and the tenant it speaks for."""

    digest: bytes
    tenant: str


def parse_keys(entries: list[str]) -> list[ApiKey]:
    """`name=key` or `key`. Several keys may share a name, so that they can be rotated; no key may have two.

    Raises `ConfigError` without repeating a key.
    """
    keys: dict[bytes, str] = {}
    for position, entry in enumerate(entries, 1):
        name, equals, key = entry.partition("=")
        if not equals:
            name, key = "", entry
        elif not _NAME.match(name):
            raise ConfigError(f"api_keys entry {position}: a name has 1 to 64 of A-Z a-z 0-9 . _ @ - before '='")
        if not key.strip("= \t"):
            raise ConfigError(f"api_keys entry {position} has no key; a key that contains '=' is written name=key")
        digest = _digest(key.encode())
        tenant = name or "key-" + digest.hex()[:12]
        if keys.get(digest, tenant) != tenant:
            raise ConfigError(f"api_keys entry {position}: the same key is given to {keys[digest]!r} and {tenant!r}")
        keys[digest] = tenant
    return [ApiKey(digest, tenant) for digest, tenant in keys.items()]


def find_tenant(keys: list[ApiKey], presented: bytes) -> str | None:
    """The tenant of a presented key. Looks at every key, whichever matches."""
    digest = _digest(presented)
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key.tenant
    return found


class AuthMiddleware:
    """Refuses requests without a valid key and names the tenant of all others in its record."""

    def __init__(self, app: ASGIApp, keys: list[ApiKey]):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `HttpProblem` 401, which the middleware around this one answers."""
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
        # A browser's WebSocket can send no header of its own.
        given = parse_qs(scope["query_string"].decode("latin-1")).get("api_key", [])
        return given[0].encode() if len(given) == 1 else b""
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].partition(b" ")
    return bytes(key.strip()) if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
