"""`/v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served name, as `/v1/models` lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["weft"] = "weft"
    root: str
    """The model as the server was given it, without its folder."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; null while the engine starts."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Cards of all served names, in the order of configuration."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
