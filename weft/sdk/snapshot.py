"""The state of a context as a value, from which this or another program can continue."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.abi.errors import InvalidRequest
from weft.sdk.chat import Chat
from weft.sdk.model import Model

VERSION = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a context at one moment; independent of the context afterwards."""

    model: str
    tokens: tuple[int, ...]
    base: int
    """Number of tokens before the chat."""
    chat: Chat
    masks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """(number of tokens at that point, ranges hidden from the tokens after it), in order."""

    def check(self, model: Model) -> None:
        """Raise `InvalidRequest`, naming both models, if the snapshot belongs to another model."""
        if self.model != model.name:
            raise InvalidRequest(
                f"the context belongs to the model {self.model}; this program runs beside {model.name}", "model"
            )

    def to_json(self) -> dict[str, Any]:
        """The snapshot as JSON values."""
        chat = asdict(self.chat)
        chat["raw"] = {str(at): text for at, text in self.chat.raw.items()}
        return {
            "version": VERSION,
            "model": self.model,
            "tokens": list(self.tokens),
            "base": self.base,
            "masks": [[start, [list(pair) for pair in ranges]] for start, ranges in self.masks],
            "chat": chat,
        }

    @classmethod
    def from_json(cls, value: Any) -> Snapshot:
        """Decode the value of `to_json`. Raises `InvalidRequest` for any other value."""
        try:
            if value["version"] != VERSION:
                raise InvalidRequest(f"the snapshot has version {value['version']}; this library reads {VERSION}")
            chat = dict(value["chat"])
            chat["raw"] = {int(at): text for at, text in chat["raw"].items()}
            masks = tuple(
                (start, tuple((first, last) for first, last in ranges)) for start, ranges in value.get("masks", ())
            )
            return cls(value["model"], tuple(value["tokens"]), value["base"], Chat(**chat), masks)
        except (TypeError, KeyError, ValueError, AttributeError):
            raise InvalidRequest("the stored value is not a snapshot of a context") from None
