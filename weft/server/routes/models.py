"""`/v1/models`: the names that are served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.endpoints import model_cards
from weft.server.routes.base import answer, route
from weft.server.state import Service


def routes(service: Service) -> list[Route]:
    """The routes of this family. Names may have slashes, as hub ids do."""
    return [
        route(service, "GET", "/v1/models", list_models),
        route(service, "GET", "/v1/models/{model:path}", get_model),
    ]


async def list_models(service: Service, request: Request) -> ASGIApp:
    """One card per served name."""
    return answer(model_cards.list_models(service.models))


async def get_model(service: Service, request: Request) -> ASGIApp:
    """The card of one served name. Raises `UnknownModel` for a name that is not served."""
    return answer(model_cards.get_model(request.path_params["model"], service.models))
