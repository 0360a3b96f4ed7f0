"""Models and what they can do: the part of the Core trait that a program asks first.

A program runs beside one model, its own; the others of the server are listed so that it can launch programs there.
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
"""Names of all traits, and which others each one includes."""
_KEY = "models"


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One model of the server. Sizes are in tokens unless they say otherwise."""

    name: str
    traits: tuple[str, ...] = ()
    vocab_size: int = 0
    page_size: int = 0
    """Tokens of a KV page."""
    max_context: int = 0
    """Longest sequence."""
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    """Numbers of an embedding."""
    chat_template: bool = True
    """Whether messages can be rendered for it."""
    dtype: str = ""
    device: str = ""
    tool_call_parser: str | None = None
    """How the model writes calls of tools: a key of `weft.text.tool_calls.PARSERS`; None: it was not trained to."""
    reasoning: bool = False
    """Whether it thinks between `<think>` and `</think>`."""

    def has(self, trait: str) -> bool:
        """Whether it has the trait."""
        return trait in self.traits

    def require(self, trait: str) -> None:
        """Raise `Unsupported`, naming the trait, unless the model has it."""
        if trait not in self.traits:
            raise Unsupported(f"the model {self.name} has no trait {trait}; it has {', '.join(self.traits)}", trait)


async def models() -> list[Model]:
    """All models of the server, the program's own first. Asked once.

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
    """Fields that this version does not know are left out: the host may be newer."""
    names = {field.name for field in dataclasses.fields(Model)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key in names
    }
    return Model(**values)
