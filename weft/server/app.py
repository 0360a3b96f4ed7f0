"""The ASGI application: the routes and the middleware around them.

From outside to inside: CORS; request ids, logs and errors; hosts and origins; keys; admission; routes. Keys are checked
before routing. A browser's preflight request, which cannot carry a key, is answered before the check of keys. Pages of
allowed origins may read errors too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config import ServerConfig
from weft.server.api_keys import parse_keys
from weft.server.auth import AuthMiddleware
from weft.server.limits import AdmissionMiddleware
from weft.server.origins import HostMiddleware
from weft.server.request_log import RequestMiddleware
from weft.server.routes import (
    documentation,
    endpoints,
    explanations,
    models,
    operations,
    programs,
    runs,
    sessions,
    variables,
    workflows,
)
from weft.server.state import Service


class Family(Protocol):
    """A module under `weft.server.routes` with the routes of one API family."""

    def routes(self, service: Service) -> Sequence[Route | WebSocketRoute]:
        """The routes of this family."""


FAMILIES: tuple[Family, ...] = (
    endpoints,
    models,
    programs,
    runs,
    workflows,
    explanations,
    variables,
    sessions,
    operations,
    documentation,
)


class App:
    """The application. `routes` has all routes, for documentation and tests."""

    def __init__(self, routes: Sequence[Route | WebSocketRoute], outermost: ASGIApp, service: Service):
        self.routes = routes
        self.service = service
        self._outermost = outermost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or start and stop with the server."""
        # With `app` set, Starlette's router raises for an unknown path, and the response has the shape of all errors.
        scope["app"] = self
        await self._outermost(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """The route of all other paths. Starlette's own refuses a WebSocket without a reason."""
    raise HTTPException(404)


def create_app(config: ServerConfig, service: Service) -> App:
    """The application over a service. Raises `ConfigError` for invalid keys."""

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    routes = [route for family in FAMILIES for route in family.routes(service)]
    app: ASGIApp = Router(routes, redirect_slashes=False, default=_not_found, lifespan=lifespan)
    app = AdmissionMiddleware(app, service)
    app = AuthMiddleware(app, parse_keys(config.api_keys))
    app = HostMiddleware(app, config)
    app = RequestMiddleware(app, service)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
    return App(routes, app, service)
