"""`/v1/models`: the names that are served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.endpoints.models import ActiveModel
from weft.endpoints.schemas.models import ModelCard, ModelList
from weft.server.routes.base import answer, route
from weft.server.state import Service


def routes(service: Service) -> list[Route]:
    """The routes of this family. Names may have slashes, as hub ids do."""
    return [
        route(service, "GET", "/v1/models", list_models),
        route(service, "GET", "/v1/models/{model:path}", get_model),
    ]


async def list_models(service: Service, request: Request) -> ASGIApp:
    """One card per served name, in the order of configuration."""
    return answer(ModelList(data=[_card(name, model) for name, model in service.models.by_name.items()]))


async def get_model(service: Service, request: Request) -> ASGIApp:
    """The card of one served name. Raises `UnknownModel` for a name that is not served."""
    name = request.path_params["model"]
    return answer(_card(name, service.models.find(name)))


def _card(name: str, model: ActiveModel) -> ModelCard:
    context = model.max_context if model.engine.ready else None
    return ModelCard(id=name, created=model.created, root=model.root, max_model_len=context)
