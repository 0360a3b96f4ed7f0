"""`/openapi.json` and `/docs`: what there is, from the same structs that check requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.server.openapi import openapi_json, openapi_page
from weft.server.routes.base import route
from weft.server.state import Service

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page has no scripts and loads nothing."""


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "GET", "/openapi.json", schema),
        route(service, "GET", "/docs", page),
    ]


async def schema(service: Service, request: Request) -> ASGIApp:
    """The OpenAPI document."""
    return Response(openapi_json(), media_type="application/json")


async def page(service: Service, request: Request) -> ASGIApp:
    """The same, to read."""
    return Response(openapi_page(), media_type="text/html", headers={"content-security-policy": PAGE_POLICY})
