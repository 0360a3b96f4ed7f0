"""`/v1/sessions`: what the caller's sequences wait for, and where their KV is."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.core.wire import SessionInfo
from weft.endpoints.models import ActiveModel
from weft.server.record import record_of
from weft.server.routes.base import answer, integer, route
from weft.server.schemas.sessions import DEFAULT_LIMIT, MAX_LIMIT, SessionCard, SessionCards
from weft.server.state import Service


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [route(service, "GET", "/v1/sessions", list_sessions)]


async def list_sessions(service: Service, request: Request) -> ASGIApp:
    """The sessions of the caller's tenant that wait longest, of all models or of the one that `model` names. Raises
    `InvalidRequest`, `UnknownModel`, and `EngineDead` where an engine does not answer."""
    asked = request.query_params.get("model")
    limit = integer("limit", request.query_params.get("limit"), DEFAULT_LIMIT, 1, MAX_LIMIT)
    models = list(service.models) if asked is None else [service.models.find(asked)]
    usable = [service.models.usable(model.names[0]) for model in models]
    tenant = record_of(request).tenant
    found = await asyncio.gather(*(model.engine.sessions(tenant, limit) for model in usable))
    now = time.time()
    cards = [
        _card(info, model, tenant, now) for model, listed in zip(models, found, strict=True) for info in listed.sessions
    ]
    cards.sort(key=lambda card: card.since)
    total = sum(listed.total for listed in found)
    cards = cards[:limit]
    return answer(SessionCards(data=cards, left_out=total - len(cards)))


def _card(info: SessionInfo, model: ActiveModel, tenant: str, now: float) -> SessionCard:
    return SessionCard(
        id=info.id,
        engine=info.engine,
        request_id=info.request_id.removeprefix(f"{tenant}/") if tenant else info.request_id,
        model=model.names[0],
        state=info.state,
        waits_for=info.kind,
        tokens=info.num_tokens,
        device_tokens=info.device_tokens,
        host_tokens=info.host_tokens,
        gone_tokens=info.gone_tokens,
        since=now - info.waited_s,
        until=None if info.expected_in_s is None else now + info.expected_in_s,
        expected_by=info.expected_by,
    )
