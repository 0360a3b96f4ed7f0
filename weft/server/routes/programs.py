"""`/v1/programs`: uploaded programs and the operator's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.endpoints.errors import require
from weft.server.guard import Guard
from weft.server.limits import body_of, content_type_of
from weft.server.programs import Found
from weft.server.record import record_of
from weft.server.routes.base import answer, read, route
from weft.server.schemas.programs import RAW_KINDS, ProgramCard, ProgramDeleted, ProgramList, ProgramUpload, VersionCard
from weft.server.state import Service
from weft.store.programs import ProgramVersion


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [
        route(service, "POST", "/v1/programs", upload),
        route(service, "GET", "/v1/programs", list_programs),
        route(service, "GET", "/v1/programs/{program}", get_program),
        route(service, "DELETE", "/v1/programs/{program}", delete_program),
    ]


async def upload(service: Service, request: Request) -> ASGIApp:
    """Upload a new version of a program."""
    kind = RAW_KINDS.get(content_type_of(request))
    if kind is None:
        body = await read(service, request, ProgramUpload)
        name, content, kind = body.name, body.source.encode("utf-8", "surrogatepass"), "python"
    else:
        name = request.query_params.get("name", "")
        require(bool(name), "name is required: add ?name=… to the address.", "name")
        async with body_of(request, service) as content:
            pass  # the content is stored unchanged; the registry checks its size
    async with Guard(request, service):
        program = await service.programs.upload(record_of(request).tenant, name, content, kind)
    return answer(_card(Found(program, program.latest, False)))


async def list_programs(service: Service, request: Request) -> ASGIApp:
    """List all programs of the caller."""
    visible = await service.programs.visible(record_of(request).tenant)
    return answer(ProgramList(data=[_card(found) for found in visible]))


async def get_program(service: Service, request: Request) -> ASGIApp:
    """One program, by name, `name@hash` or hash."""
    found = await service.programs.find(record_of(request).tenant, request.path_params["program"])
    return answer(_card(found))


async def delete_program(service: Service, request: Request) -> ASGIApp:
    """Delete a name with all its versions, or one version."""
    name, gone = await service.programs.delete(record_of(request).tenant, request.path_params["program"])
    return answer(ProgramDeleted(name=name, deleted=gone))


def _card(found: Found) -> ProgramCard:
    version = found.version
    return ProgramCard(
        name=found.program.name,
        hash=version.hash,
        kind=version.kind,
        size_bytes=version.size_bytes,
        created=version.created_s,
        versions=[_version(one) for one in found.program.versions],
        trusted=found.trusted,
    )


def _version(version: ProgramVersion) -> VersionCard:
    return VersionCard(hash=version.hash, kind=version.kind, size_bytes=version.size_bytes, created=version.created_s)
