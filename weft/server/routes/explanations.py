"""`/v1/workflows/{workflow}/explain`, `/v1/runs/{run}/explain`: what a run would do, and what it did."""

from __future__ import annotations

from typing import get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.endpoints.errors import require
from weft.server.guard import Guard
from weft.server.record import record_of
from weft.server.routes.base import read, route
from weft.server.routes.workflows import workflow_run_id
from weft.server.schemas.workflows import WorkflowExplainRequest
from weft.server.state import Service
from weft.workflow.explain.report import ExplainFormat, Explanation
from weft.workflow.service.explained import ExplainAsked

_MEDIA: dict[ExplainFormat, str] = {
    "json": "application/json",
    "text": "text/plain",
    "mermaid": "text/plain",
    "svg": "image/svg+xml",
}
_POLICY = {"content-security-policy": "default-src 'none'", "x-content-type-options": "nosniff"}
"""A picture has names of a client, and might be opened as a page."""


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "POST", "/v1/workflows/{workflow}/explain", explain_workflow),
        route(service, "GET", "/v1/runs/{run}/explain", explain_run),
    ]


async def explain_workflow(service: Service, request: Request) -> ASGIApp:
    """Say what a run of a workflow would do."""
    body = await read(service, request, WorkflowExplainRequest)
    require((body.num_rows is None) != (not body.rows), "Give one of rows and num_rows.", "rows")
    workflow = await service.workflows.library.find(record_of(request).tenant, request.path_params["workflow"])
    rows = body.rows if body.num_rows is None else body.num_rows
    asked = ExplainAsked(rows, body.statistics, body.model, body.optimise, body.cache, body.cache_salt)
    async with Guard(request, service):
        made = await service.workflows.explanations.before(record_of(request).tenant, workflow, asked)
        return await _rendered(service, request, made, body.format)


async def explain_run(service: Service, request: Request) -> ASGIApp:
    """Say what a run was expected to do, and what it did by now."""
    form: ExplainFormat = request.query_params.get("format", "json")  # type: ignore[assignment]
    require(form in get_args(ExplainFormat), f"format is one of {', '.join(get_args(ExplainFormat))}.", "format")
    run = await service.workflows.runs.find(record_of(request).tenant, workflow_run_id(request))
    async with Guard(request, service):
        return await _rendered(service, request, await service.workflows.explanations.of_run(run), form)


async def _rendered(service: Service, request: Request, made: Explanation, form: ExplainFormat) -> ASGIApp:
    """On a thread: predictions and long lists take time."""

    def work() -> bytes:
        content = made.rendered(form)
        return content.encode("utf-8", "replace") if isinstance(content, str) else msgspec.json.encode(content)

    content = await service.workflows.evaluations.on_thread(record_of(request).tenant, work)
    return Response(content, media_type=_MEDIA[form], headers=_POLICY)
