"""Checks the host that a request names, and the origin of the web page that sends it.

A server that listens on loopback and asks for no key trusts the users of its machine. Web pages that they visit are not
trusted: a page whose owner lets a name resolve to 127.0.0.1 (DNS rebinding), or that sends a plain form, uses their
browser to reach the server. Such a server therefore answers only requests whose `Host` and `Origin` are local or named
in `allowed_hosts`. Browsers let every page open a WebSocket, so a WebSocket's `Origin` is checked on every server.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config import ServerConfig
from weft.server.errors import HttpProblem

ANY = "*"
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:/?#@\\\s]+)(?::[0-9]*)?")


class HostMiddleware:
    """Refuses requests that name a foreign host or come from a foreign page."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._config = config
        is_trusting = _is_local(config.host) and not config.api_keys
        self._allowed = {_normal(host) for host in config.allowed_hosts}
        self._domains = tuple(host[1:] for host in self._allowed if host.startswith("*."))
        self._checks_hosts = ANY not in config.allowed_hosts and (is_trusting or bool(config.allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Raises `HttpProblem` 403, which the outer middleware answers."""
        if scope["type"] != "lifespan":
            host, origin = _header(scope, b"host"), _header(scope, b"origin")
            if self._checks_hosts and host is not None:
                self._check_host(host)
            if origin is not None and (self._checks_hosts or scope["type"] == "websocket"):
                self._check_origin(origin, host)
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        name = _without_port(host)
        if not self._knows(name):
            raise HttpProblem(
                403,
                f"This server does not answer requests for the host {(name or host)[:100]!r}. Send them to "
                "localhost, or start the server with this name in server.allowed_hosts (--allowed-host).",
                code="host_not_allowed",
            )

    def _check_origin(self, origin: str, host: str | None) -> None:
        allowed = self._config.cors_origins
        page = origin.partition("://")[2]
        is_own = page == host  # `host` was checked before, if hosts are checked
        if is_own or origin in allowed or ANY in allowed or (self._checks_hosts and self._knows(_without_port(page))):
            return
        raise HttpProblem(
            403,
            f"Pages of the origin {origin[:100]!r} may not call this server; start it with this origin in "
            "server.cors_origins (--cors-origin) to allow them.",
            code="origin_not_allowed",
        )

    def _knows(self, name: str) -> bool:
        name = _normal(name)
        return _is_local(name) or name in self._allowed or name.endswith(self._domains)


def _header(scope: Scope, wanted: bytes) -> str | None:
    found: bytes | None = next((value for name, value in scope["headers"] if name == wanted), None)
    return None if found is None else found.decode("latin-1")


def _without_port(authority: str) -> str:
    """The `name` or `[address]` in `name`, `name:port` or `[address]:port`; empty for any other form."""
    found = _AUTHORITY.fullmatch(authority)
    return "" if found is None else found[1]


def _normal(name: str) -> str:
    return name.strip("[]").lower().rstrip(".")


def _is_local(name: str) -> bool:
    """Whether the name is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
