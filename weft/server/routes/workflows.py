"""`/v1/workflows`: graphs of calls that are known in advance."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.server.guard import Guard
from weft.server.record import record_of
from weft.server.routes.base import answer, read, route
from weft.server.schemas.workflows import WorkflowCard, WorkflowDeleted, WorkflowList, WorkflowUpload
from weft.server.state import Service
from weft.workflow.service.library import StoredWorkflow


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "POST", "/v1/workflows", create),
        route(service, "GET", "/v1/workflows", list_workflows),
        route(service, "GET", "/v1/workflows/{workflow}", get_workflow),
        route(service, "DELETE", "/v1/workflows/{workflow}", delete_workflow),
    ]


async def create(service: Service, request: Request) -> ASGIApp:
    """Check and store a graph. Raises `InvalidGraph` with every mistake."""
    body = await read(service, request, WorkflowUpload)
    async with Guard(request, service):
        stored = await service.workflows.library.create(record_of(request).tenant, body.graph, body.name)
    return answer(_card(stored))


async def list_workflows(service: Service, request: Request) -> ASGIApp:
    """List all workflows of the caller, without their graphs."""
    found = await service.workflows.library.all(record_of(request).tenant)
    return answer(WorkflowList(data=[_card(stored) for stored in found]))


async def get_workflow(service: Service, request: Request) -> ASGIApp:
    """One workflow, with its graph."""
    stored = await service.workflows.library.find(record_of(request).tenant, request.path_params["workflow"])
    return answer(msgspec.structs.replace(_card(stored), graph=msgspec.Raw(stored.row.graph)))


async def delete_workflow(service: Service, request: Request) -> ASGIApp:
    """Delete a workflow."""
    id = await service.workflows.library.delete(record_of(request).tenant, request.path_params["workflow"])
    return answer(WorkflowDeleted(id=id))


def _card(stored: StoredWorkflow) -> WorkflowCard:
    row, summary = stored
    return WorkflowCard(
        id=row.id,
        hash=row.id,
        name=row.name,
        inputs=summary.inputs,
        outputs=summary.outputs,
        nodes=summary.nodes,
        size_bytes=row.size_bytes,
        created=row.created_s,
    )
