"""The models of the server and their traits.

A program runs beside one model, its own. The other models are listed so that it can launch children beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from weft.abi.errors import Unsupported
from weft.abi.operations import Op
from weft.sdk.answers import json_of
from weft.sdk.channel import current

SUPERTRAITS: Mapping[str, tuple[str, ...]] = {
    "Core": (),
    "Messaging": ("Core",),
    "Allocate": ("Core",),
    "Forward": ("Allocate",),
    "InputText": ("Allocate", "Forward"),
    "InputImage": ("Allocate", "Forward"),
    "Tokenize": ("InputText",),
    "OutputText": ("Allocate",),
    "Adapter": ("Forward",),
    "Sequence": ("Core",),
    "Grammar": ("Core",),
    "Store": ("Core",),
}
"""Trait -> the traits that it includes."""
_KEY = "models"


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One model of the server. Sizes are in tokens unless they say otherwise."""

    name: str
    traits: tuple[str, ...] = ()
    vocab_size: int = 0
    page_size: int = 0
    """Tokens per KV page."""
    max_context: int = 0
    """Length of the longest sequence, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    """Number of elements of an embedding."""
    chat_template: bool = True
    """Whether the model has a chat template."""
    dtype: str = ""
    device: str = ""
    tool_call_parser: str | None = None
    """The form of the model's tool calls, a key of `weft.text.tool_calls.PARSERS`; None: it was not trained to call."""
    reasoning: bool = False
    """Whether the model writes reasoning between `<think>` and `</think>`."""

    def has(self, trait: str) -> bool:
        """Whether the model has the trait."""
        return trait in self.traits

    def require(self, trait: str) -> None:
        """Raise `Unsupported`, naming the trait, unless the model has it."""
        if trait not in self.traits:
            raise Unsupported(f"the model {self.name} has no trait {trait}; it has {', '.join(self.traits)}", trait)


async def models() -> list[Model]:
    """All models of the server, the program's own first. Cached after the first call.

    >>> [model.name for model in await models()]
    """
    channel = current()
    found: list[Model] | None = channel.values.get(_KEY)
    if found is None:
        found = [_model(fields) for fields in json_of(await channel.ask(Op.MODELS))]
        channel.values[_KEY] = found
    return list(found)


async def own_model() -> Model:
    """The model that this program runs beside."""
    return (await models())[0]


def _model(fields: Mapping[str, Any]) -> Model:
    """A model from its fields. Drops fields that this version does not know: the host may be newer."""
    names = {field.name for field in dataclasses.fields(Model)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key in names
    }
    return Model(**values)
