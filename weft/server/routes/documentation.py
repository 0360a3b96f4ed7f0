"""`/`, `/openapi.json` and `/docs`: the documentation of the API, from the structs that check requests.

They are answered without a key: they have no secrets, and the page says how to send a key.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.server.openapi import openapi_json
from weft.server.pages import docs_page, start_page
from weft.server.routes.base import route
from weft.server.state import Service

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The pages have no scripts and load nothing."""


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "GET", "/", start),
        route(service, "GET", "/openapi.json", schema),
        route(service, "GET", "/docs", page),
    ]


async def start(service: Service, request: Request) -> ASGIApp:
    """The start page: HTML for browsers, plain text for others. It names no model to clients without a key."""
    needs_key = bool(service.config.api_keys)
    model = service.models[0].names[0]
    named = {} if len(service.models) == 1 or needs_key else {"model": model}
    body = {**named, "messages": [{"role": "user", "content": "Hello"}]}
    key = "  -H 'Authorization: Bearer <key>' \\\n" if needs_key else ""
    curl = (
        f"curl {request.url.scheme}://{request.url.netloc}/v1/chat/completions \\\n{key}"
        f"  -H 'Content-Type: application/json' \\\n  -d '{msgspec.json.encode(body).decode()}'"
    )
    told = None if needs_key else model
    if "text/html" in request.headers.get("accept", ""):
        return _html(start_page(curl, told))
    serves = "" if told is None else f" It serves {told}."
    text = f"Weft, a server of language models with OpenAI's API.{serves}\nSee /docs. Try:\n\n{curl}\n"
    return Response(text, media_type="text/plain")


async def schema(service: Service, request: Request) -> ASGIApp:
    """The OpenAPI document as JSON; its security follows the configured keys."""
    return Response(openapi_json(needs_key=bool(service.config.api_keys)), media_type="application/json")


async def page(service: Service, request: Request) -> ASGIApp:
    """The OpenAPI document as an HTML page."""
    return _html(docs_page(needs_key=bool(service.config.api_keys)))


def _html(page: bytes) -> Response:
    return Response(page, media_type="text/html", headers={"content-security-policy": PAGE_POLICY})
