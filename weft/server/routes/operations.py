"""Routes for operators: health, readiness, version, metrics, traces."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.server.errors import HttpProblem, retry_headers
from weft.server.metrics_http import exposition
from weft.server.record import record_of
from weft.server.routes.base import answer, route
from weft.server.schemas.service import ServerVersion, Status
from weft.server.state import Service
from weft.version import __version__


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "GET", "/health", health),
        route(service, "GET", "/ready", ready),
        route(service, "GET", "/version", version),
        route(service, "GET", "/metrics", metrics),
        route(service, "GET", "/v1/traces/{request_id}", trace),
    ]


async def health(service: Service, request: Request) -> ASGIApp:
    """200 while the event loop runs, in any state of the engines."""
    return answer(Status(status="ok"))


async def ready(service: Service, request: Request) -> ASGIApp:
    """Whether new requests are answered now: 200, or 503 while an engine starts or is down, or the server drains."""
    if service.ready:
        return answer(Status(status="ready"))
    if service.draining:
        response = answer(Status(status="draining"), 503)
    else:
        started = all(model.was_ready for model in service.models)
        response = answer(Status(status="unavailable" if started else "starting"), 503)
    response.headers.update(retry_headers(1.0))
    return response


async def version(service: Service, request: Request) -> ASGIApp:
    """The version of the package."""
    return answer(ServerVersion(version=__version__))


async def metrics(service: Service, request: Request) -> ASGIApp:
    """All metrics in Prometheus' format."""
    body, content_type = await exposition(service, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def trace(service: Service, request: Request) -> ASGIApp:
    """The spans of a recent request of the caller's tenant. Raises `HttpProblem` 404 for an unknown request."""
    if not service.traces.enabled:
        raise HttpProblem(404, "Tracing is off; start the server with trace = true.", code="tracing_off")
    found = service.traces.get(record_of(request).tenant, request.path_params["request_id"])
    if found is None:
        raise HttpProblem(404, "No recent request has this id.", code="trace_not_found")
    return answer(found)
