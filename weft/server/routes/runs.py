"""`/v1/runs`: runs of programs, and their messages."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from weft.abi.errors import WeftError
from weft.endpoints.errors import require
from weft.programs.registry import Code
from weft.programs.run.runs import Run, RunSpec
from weft.server.guard import Guard, until_over
from weft.server.limits import INLINE_DECODE_BYTES
from weft.server.record import record_of
from weft.server.routes.base import answer, read, route
from weft.server.run_events import RunStream, card_of
from weft.server.run_socket import RunSocket
from weft.server.schemas.programs import (
    LogEntry,
    LogList,
    MessageRequest,
    RunDeleted,
    RunList,
    RunRequest,
    SourceRunRequest,
)
from weft.server.state import Service
from weft.server.workflow_cards import workflow_run_card
from weft.tokenizers.tokenizer import off_loop
from weft.workflow.service.record import is_workflow_run

_encode = msgspec.json.encode


def routes(service: Service) -> list[Route | WebSocketRoute]:
    """The routes of this family."""
    return [
        route(service, "POST", "/v1/programs/{program}/runs", run_program),
        route(service, "POST", "/v1/runs", run_source),
        route(service, "GET", "/v1/runs", list_runs),
        route(service, "GET", "/v1/runs/{run}", get_run),
        route(service, "DELETE", "/v1/runs/{run}", delete_run),
        route(service, "GET", "/v1/runs/{run}/logs", get_logs),
        route(service, "GET", "/v1/runs/{run}/messages", follow),
        route(service, "POST", "/v1/runs/{run}/messages", send_message),
        route(service, "POST", "/v1/runs/{run}/cancel", cancel),
        WebSocketRoute("/v1/runs/{run}", RunSocket(service, "/v1/runs/{run}"), name="WS /v1/runs/{run}"),
    ]


async def run_program(service: Service, request: Request) -> ASGIApp:
    """Run the program that the path names. Raises `UnknownProgram` and the errors of `_run`."""
    body = await read(service, request, RunRequest)
    code = await service.programs.code(record_of(request).tenant, request.path_params["program"])
    return await _run(service, request, body, code)


async def run_source(service: Service, request: Request) -> ASGIApp:
    """Run a source, or an uploaded program that the body names."""
    body = await read(service, request, SourceRunRequest)
    require((body.source is None) != (body.program is None), "Give one of source and program.", "source")
    if body.source is not None:
        async with Guard(request, service):
            code = await service.programs.inline_code(record_of(request).tenant, body.source)
    else:
        code = await service.programs.code(record_of(request).tenant, body.program or "")
    return await _run(service, request, body, code)


async def _run(service: Service, request: Request, body: RunRequest, code: Code) -> ASGIApp:
    require(not (body.stream and body.background), "stream and background exclude each other.", "background")
    record = record_of(request)
    model = service.models.usable(body.model)
    record.model, record.stream = model.names[0], body.stream
    args, *messages = await _encoded(request, [body.args, *body.messages])
    spec = RunSpec(
        code=code,
        args=args,
        limits=service.programs.limits(body.limits),
        trusted=code.trusted,
        model=model.names[0],
        reserve_pages=body.reserve_pages,
    )
    caller = record.caller(cache_salt=body.cache_salt, priority=body.priority)
    run = await service.programs.launch(spec, caller)
    try:
        for message in messages:
            run.send(message)
        if messages:
            await run.refresh()  # raises the refusal of a message by the program host
    except WeftError:
        run.cancel("a message that came with it could not be taken")
        raise
    if body.stream:
        return RunStream(request, service, run, owned=True)
    if not body.background:
        await until_over(service, request, run)
    return answer(card_of(run.record(), run.result), 202 if body.background else 200)


async def list_runs(service: Service, request: Request) -> ASGIApp:
    """List the caller's runs, newest first."""
    tenant = record_of(request).tenant
    workflows = await service.workflows.runs.all(tenant)
    cards = [card_of(run.record(), forgotten=run.forgotten) for run in service.programs.history.runs(tenant)]
    cards += [workflow_run_card(run, in_list=True) for run in workflows]
    return answer(RunList(data=sorted(cards, key=lambda card: -card.created)))


async def get_run(service: Service, request: Request) -> ASGIApp:
    """One run, with its result if it has finished."""
    if is_workflow_run(request.path_params["run"]):
        found = await service.workflows.runs.find(record_of(request).tenant, request.path_params["run"])
        return answer(workflow_run_card(found))
    run = _find(service, request)
    await run.refresh()
    return answer(card_of(run.record(), run.result, forgotten=run.forgotten))


async def delete_run(service: Service, request: Request) -> ASGIApp:
    """Delete the record of an ended run; of a workflow also its results."""
    if is_workflow_run(request.path_params["run"]):
        await service.workflows.runs.delete(record_of(request).tenant, request.path_params["run"])
        return answer(RunDeleted(id=request.path_params["run"]))
    run = _find(service, request)
    service.programs.history.forget(run.tenant, run.id)
    return answer(RunDeleted(id=run.id))


async def get_logs(service: Service, request: Request) -> ASGIApp:
    """The lines of a run's log that are kept, oldest first. Raises `UnknownRun`."""
    run = _find(service, request)
    lines = [LogEntry(at=line.at_s, level=line.level, text=line.text) for line in run.logs()]
    return answer(LogList(data=lines, lost=run.lost_log_lines))


async def follow(service: Service, request: Request) -> ASGIApp:
    """The messages of a run as server-sent events: those that are kept, then new ones, then its end."""
    run = _find(service, request)
    record_of(request).stream = True
    return RunStream(request, service, run, owned=False)


async def send_message(service: Service, request: Request) -> ASGIApp:
    """Put a message on a run's inbox. Raises `UnknownRun`, `RunEnded`, and `Overloaded` for a full inbox."""
    body = await read(service, request, MessageRequest)
    run = _find(service, request)
    [message] = await _encoded(request, [body.message])
    await run.deliver(message)
    return answer(card_of(run.record()))


async def cancel(service: Service, request: Request) -> ASGIApp:
    """Cancel a run, and wait until it has ended."""
    if is_workflow_run(request.path_params["run"]):
        found = await service.workflows.runs.cancel(record_of(request).tenant, request.path_params["run"])
        async with Guard(request, service):
            await found.wait()
        return answer(workflow_run_card(found))
    run = _find(service, request)
    run.cancel()
    async with Guard(request, service):
        await run.wait()
    return answer(card_of(run.record()))


async def _encoded(request: Request, values: list[Any]) -> list[bytes]:
    """Values of the request's body as JSON; encoded on a thread if the body is large."""
    record = record_of(request)
    if record.body_bytes <= INLINE_DECODE_BYTES:
        return [_encode(value) for value in values]
    return await off_loop(lambda: [_encode(value) for value in values], tenant=record.tenant)


def _find(service: Service, request: Request) -> Run:
    id = request.path_params["run"]
    require(not is_workflow_run(id), "This is a run of a workflow: it has events and results.", "run")
    return service.programs.history.find(record_of(request).tenant, id)
