"""`/v1/calls` and `/v1/variables`: calls of sessions, which run as they are submitted, and their values."""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.abi.errors import InvalidRequest
from weft.endpoints.errors import require
from weft.endpoints.fields import request_from
from weft.server.guard import Guard
from weft.server.limits import read_request
from weft.server.record import record_of
from weft.server.routes.base import answer, read, route
from weft.server.schemas.variables import (
    MAX_TIMEOUT_S,
    CallReceipt,
    CallRequest,
    CallVariable,
    SessionEnded,
    VariableCard,
    VariableError,
    VariableUpdate,
)
from weft.server.state import Service
from weft.workflow.criteria import LATENCY, THROUGHPUT, TTFT, Criterion, deadline
from weft.workflow.run.value_errors import NodeFailed
from weft.workflow.service.run_variables import VariableAnswer, is_run_variable

_CRITERIA: dict[str, Criterion] = {criterion.name: criterion for criterion in (LATENCY, TTFT, THROUGHPUT)}


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "POST", "/v1/calls", submit),
        route(service, "GET", "/v1/variables/{variable}", get_variable),
        route(service, "PUT", "/v1/variables/{variable}", set_variable),
        route(service, "DELETE", "/v1/sessions/{session}", end_session),
    ]


async def submit(service: Service, request: Request) -> ASGIApp:
    """Submit calls. Answers with the variables of their values, before there are any."""
    body = await read(service, request, CallRequest)
    record = record_of(request)
    require((body.prompt is None) != (body.nodes is None), "Give one of prompt and nodes.", "prompt")
    require(not body.continues or body.session_id is not None, "continues needs session_id.", "continues")
    submitting = service.sessions.submitting
    with submitting(record.tenant, body.session_id, record.body_bytes, continues=body.continues) as session:
        if body.nodes is not None:
            given = body.placeholders or body.raw or body.model is not None or body.sampling
            require(not given, "nodes cannot be combined with the fields of a prompt.", "nodes")
            made = await session.nodes(body.nodes)
        else:
            fields = {**body.sampling, **({} if body.model is None else {"model": body.model})}
            find = functools.partial(service.variables.find, record.tenant)
            made = await session.template(body.prompt or "", body.placeholders, fields, find, raw=body.raw)
    variables = [CallVariable(id=session.variable_id(variable), name=name) for name, variable in made.items()]
    return answer(CallReceipt(session_id=session.session_id, variables=variables))


async def get_variable(service: Service, request: Request) -> ASGIApp:
    """Wait for a value. Raises `UnknownVariable`, `NoValue`, and `ClientGone`, which leaves the calls as they are."""
    id = request.path_params["variable"]
    require(not is_run_variable(id), "This variable is of a run of a workflow: its row has the value.", "variable")
    found = service.variables.find(record_of(request).tenant, id)
    criterion = _criterion(request)
    timeout_s = _seconds(request, "timeout_s")
    async with Guard(request, service):
        try:
            value = await found.owner.get(found.reference, criterion, timeout_s)
        except TimeoutError:
            return answer(VariableCard(id=id, status="pending"))
        except NodeFailed as error:
            why = VariableError(message=error.message, node=error.param or "", code=error.cause_kind)
            return answer(VariableCard(id=id, status="failed", error=why))
    return answer(VariableCard(id=id, status="ready", value=value))


async def set_variable(service: Service, request: Request) -> ASGIApp:
    """Give a variable from outside its value. Raises `UnknownVariable`, `NotSettable`, `NoValue`."""
    body = await read_request(request, service, _update)
    id = request.path_params["variable"]
    if is_run_variable(id):
        return await _set_run_variable(service, request, id, body)
    require(body.kind is None, "kind is only allowed for variables of runs.", "kind")
    found = service.variables.find(record_of(request).tenant, id)
    if body.error is not None:
        require(body.value is msgspec.UNSET, "Give one of value and error.", "value")
        found.owner.fail(found.reference, body.error)
        return answer(VariableCard(id=id, status="failed"))
    require(body.value is not msgspec.UNSET, "value is required, or error.", "value")
    await found.owner.put(found.reference, body.value)
    return answer(VariableCard(id=id, status="ready"))


async def _set_run_variable(service: Service, request: Request, id: str, body: VariableUpdate) -> ASGIApp:
    """Give a run of a workflow a value that it waits for. Answers when the value is on the disk."""
    require((body.error is None) != (body.value is msgspec.UNSET), "Give one of value and error.", "value")
    require(body.kind is None or body.error is not None, "kind is only allowed with error.", "kind")
    value = None if body.value is msgspec.UNSET else body.value
    given = VariableAnswer(value=value, error=body.error, kind=body.kind or "external")
    async with Guard(request, service):
        await service.workflows.variables.set(record_of(request).tenant, id, given)
    return answer(VariableCard(id=id, status="ready" if body.error is None else "failed"))


async def end_session(service: Service, request: Request) -> ASGIApp:
    """End a session: its calls in progress are cancelled, and its values are forgotten."""
    id = request.path_params["session"]
    await service.sessions.end(record_of(request).tenant, id)
    return answer(SessionEnded(id=id))


def _update(raw: Any) -> VariableUpdate:
    """The body of a PUT, in which null is a value."""
    if isinstance(raw, dict) and "value" in raw and raw["value"] is None:
        rest = request_from(VariableUpdate, {name: value for name, value in raw.items() if name != "value"})
        return VariableUpdate(value=None, error=rest.error, kind=rest.kind)
    return request_from(VariableUpdate, raw)


def _criterion(request: Request) -> Criterion | None:
    name = request.query_params.get("criterion")
    seconds = _seconds(request, "deadline_s")
    if name == "deadline":
        require(seconds is not None, "criterion deadline needs deadline_s.", "deadline_s")
        return deadline(seconds or math.inf)
    require(seconds is None, "deadline_s is only allowed with criterion deadline.", "deadline_s")
    if name is None:
        return None
    require(name in _CRITERIA, f"criterion must be one of {', '.join(_CRITERIA)}, deadline.", "criterion")
    return _CRITERIA[name]


def _seconds(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"{name} must be above 0 and at most {MAX_TIMEOUT_S:g}, in seconds.", name)
    return seconds
