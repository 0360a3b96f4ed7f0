"""`/v1/models`: the names that are served."""

from __future__ import annotations

from weft.endpoints.models import ActiveModel, Models
from weft.endpoints.schemas.models import ModelCard, ModelList


def list_models(models: Models) -> ModelList:
    """One card per served name, in the order of configuration."""
    return ModelList(data=[_card(name, model) for name, model in models.by_name.items()])


def get_model(name: str, models: Models) -> ModelCard:
    """The card of one served name. Raises `UnknownModel` for a name that is not served."""
    return _card(name, models.find(name))


def _card(name: str, model: ActiveModel) -> ModelCard:
    context = model.max_context if model.engine.ready else None
    return ModelCard(id=name, created=model.created, root=model.root, max_model_len=context)
