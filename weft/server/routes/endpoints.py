"""The routes of the endpoints: decoding, responses, and the end of requests whose client disconnects."""

from __future__ import annotations

import functools

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.endpoints.generate import INLINE_DETAILS
from weft.endpoints.table import ENDPOINTS, Endpoint
from weft.server.guard import Guard
from weft.server.limits import read_request
from weft.server.record import record_of
from weft.server.routes.base import answer, route
from weft.server.sse import AnswerStream
from weft.server.state import Service
from weft.tokenizers.tokenizer import off_loop


def routes(service: Service) -> list[Route]:
    """A route for each endpoint."""
    return [route(service, "POST", path, functools.partial(_respond, endpoint)) for path, endpoint in ENDPOINTS.items()]


async def _respond(endpoint: Endpoint, service: Service, request: Request) -> ASGIApp:
    record, models = record_of(request), service.models
    body = await read_request(request, service, lambda value: endpoint.decode(value, models))
    record.mark("read")
    async with Guard(request, service):
        reply = await endpoint.create(body, record, models)
    if not isinstance(reply, msgspec.Struct):
        return AnswerStream(request, service, reply)
    if record.num_details <= INLINE_DETAILS:
        return answer(reply)
    return await off_loop(functools.partial(answer, reply), tenant=record.tenant)
