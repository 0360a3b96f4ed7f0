"""`/v1/workflows`: graphs of calls that are known in advance."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.abi.errors import InvalidRequest
from weft.endpoints.errors import require
from weft.endpoints.fields import request_from
from weft.server.guard import Guard, until_over
from weft.server.limits import body_of, content_type_of
from weft.server.record import record_of
from weft.server.routes.base import answer, integer, read, route
from weft.server.schemas.workflows import (
    DEFAULT_PAGE,
    LINES,
    MAX_PAGE,
    WorkflowCard,
    WorkflowDeleted,
    WorkflowLimits,
    WorkflowList,
    WorkflowRunRequest,
    WorkflowUpload,
)
from weft.server.state import Service
from weft.server.workflow_cards import results_page, workflow_run_card
from weft.server.workflow_events import WorkflowStream
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.settings import plan_settings
from weft.workflow.service.library import StoredWorkflow
from weft.workflow.service.live_run import WorkflowRun
from weft.workflow.service.record import WorkflowRunSpec, is_workflow_run
from weft.workflow.service.runs import RunRequested

MAX_KEY_CHARS = 255
MAX_NUMBER = 10**15
MAX_POSITION = 10**17
KEY_LENGTH = f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters."


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "POST", "/v1/workflows", create),
        route(service, "GET", "/v1/workflows", list_workflows),
        route(service, "GET", "/v1/workflows/{workflow}", get_workflow),
        route(service, "DELETE", "/v1/workflows/{workflow}", delete_workflow),
        route(service, "POST", "/v1/workflows/{workflow}/runs", run_workflow),
        route(service, "GET", "/v1/runs/{run}/events", follow),
        route(service, "GET", "/v1/runs/{run}/results", list_results),
        route(service, "POST", "/v1/runs/{run}/resume", resume),
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
    """Delete a workflow of which no run is in progress."""
    tenant = record_of(request).tenant
    found = await service.workflows.library.find(tenant, request.path_params["workflow"])
    service.workflows.runs.check_unused(tenant, found.id)
    await service.workflows.library.delete(tenant, found.id)
    return answer(WorkflowDeleted(id=found.id))


async def run_workflow(service: Service, request: Request) -> ASGIApp:
    """Run a workflow over rows: of a JSON body, or of lines of JSON."""
    record = record_of(request)
    workflow = await service.workflows.library.find(record.tenant, request.path_params["workflow"])
    key = _idempotency_key(request)
    if content_type_of(request) in LINES:
        fields = request_from(WorkflowRunRequest, _fields_of_query(request))
        async with body_of(request, service) as body:
            run = await _start(service, request, workflow, fields, RunRequested(_spec(service, fields), body, key))
    else:
        fields = await read(service, request, WorkflowRunRequest)
        run = await _start(service, request, workflow, fields, RunRequested(_spec(service, fields), fields.rows, key))
    if not fields.background:
        run = await service.workflows.runs.here(run)
    streams, owned = bool(fields.stream) and not fields.background, key is None
    record.stream = streams
    if streams:
        return WorkflowStream(request, service, run, owned=owned)
    if fields.background:
        return answer(workflow_run_card(run), 202)
    await until_over(service, request, run, owned=owned)
    page = await service.workflows.runs.results(run, 0, MAX_PAGE)
    card = workflow_run_card(run)
    return answer(msgspec.structs.replace(card, results=results_page(page, run.record, 0)))


async def _start(
    service: Service, request: Request, workflow: StoredWorkflow, fields: WorkflowRunRequest, asked: RunRequested
) -> WorkflowRun:
    excluded = fields.stream is True and fields.background
    require(not excluded, "stream and background exclude each other, but for names of outputs.", "background")
    async with Guard(request, service):
        return await service.workflows.runs.start(record_of(request).tenant, workflow, asked)


def _spec(service: Service, fields: WorkflowRunRequest) -> WorkflowRunSpec:
    """How a run is to be; the server's settings say what the request does not."""
    config = service.workflows.config
    try:
        limits = msgspec.convert(fields.limits, WorkflowLimits)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"limits: {error}.", "limits") from None
    return WorkflowRunSpec(
        limits=RunLimits(limits.calls, limits.tokens, limits.seconds),
        cache=fields.cache,
        optimise=fields.optimise,
        model=fields.model,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        functions=tuple(sorted(set(fields.functions))),
        stream=() if isinstance(fields.stream, bool) else tuple(dict.fromkeys(fields.stream)),
        starts=fields.starts,
        objective=config.objective if fields.objective is None else fields.objective,
        deadline_s=fields.deadline_s,
        planning=plan_settings(config.planning if fields.planning is None else fields.planning, config.pinned_part),
    )


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    require(key is None or 1 <= len(key) <= MAX_KEY_CHARS, KEY_LENGTH, "Idempotency-Key")
    return key


def _fields_of_query(request: Request) -> dict[str, Any]:
    """Fields of a run: JSON where the text parses, otherwise the text."""
    fields: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        require(
            name != "rows" and name not in fields,
            f"{name[:100]} is not allowed in the query, or is given twice.",
            name[:100],
        )
        try:
            fields[name] = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            fields[name] = text
    return fields


async def follow(service: Service, request: Request) -> ASGIApp:
    """The events of a run as server-sent events, behind the one that `Last-Event-ID` or `after` names."""
    record = record_of(request)
    run = await service.workflows.runs.find_here(record.tenant, workflow_run_id(request))
    record.stream = True
    after = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    number, _, position = after.partition(".")
    seen = integer("after", number, 0, 0, MAX_NUMBER), integer("after", position or None, 0, 0, MAX_POSITION)
    return WorkflowStream(request, service, run, after=seen[0], position=seen[1])


async def list_results(service: Service, request: Request) -> ASGIApp:
    """A page of results, in the order in which rows ended."""
    runs, query = service.workflows.runs, request.query_params
    run = await runs.find(record_of(request).tenant, workflow_run_id(request))
    after = integer("after", query.get("after"), 0, 0, MAX_NUMBER)
    limit = integer("limit", query.get("limit"), DEFAULT_PAGE, 1, MAX_PAGE)
    record = run.record
    page = await runs.results(run, after, limit)
    return answer(results_page(page, record, after))


async def resume(service: Service, request: Request) -> ASGIApp:
    """Go on with a run that failed or was cancelled."""
    async with Guard(request, service):
        run = await service.workflows.runs.resume(record_of(request).tenant, workflow_run_id(request))
    return answer(workflow_run_card(run))


def workflow_run_id(request: Request) -> str:
    """The run that the path names. Raises `InvalidRequest` for one of a program."""
    id: str = request.path_params["run"]
    require(
        is_workflow_run(id),
        f"{id[:80]!r} is not a run of a workflow; runs of programs have messages and a result.",
        "run",
    )
    return id


def _card(stored: StoredWorkflow) -> WorkflowCard:
    row, summary = stored.row, stored.summary
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
