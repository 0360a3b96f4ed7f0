"""The calls of the traits InputImage and Adapter. No model supports them yet: each raises `Unsupported`, naming the
trait.

A program asks first: `(await own_model()).has("InputImage")`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from weft.abi.errors import Unsupported
from weft.sdk.model import Model
from weft.sdk.pages import Embed
from weft.sdk.queues import Queue


def num_embs_needed(model: Model, size: tuple[int, int]) -> int:
    """Embeddings that an image of (width, height) pixels takes. Raises `Unsupported`: no model takes images yet."""
    _refuse("InputImage", f"num_embs_needed: the model {model.name} takes no images; describe the image as text")


def embed_image(queue: Queue, image: bytes, embeds: Iterable[Embed]) -> None:
    """Fill embeddings with an image. Raises `Unsupported`: no model takes images yet."""
    _refuse("InputImage", "embed_img: no model of this server takes images; describe the image as text")


def load_adapter(queue: Queue, name: str) -> Any:
    """An adapter (LoRA) by name. Raises `Unsupported`: no engine has adapters yet."""
    _refuse(
        "Adapter", f"the adapter {name} cannot be used: no engine of this server has adapters; serve merged weights"
    )


def forward_with_adapter(queue: Queue, adapter: Any, **_: Any) -> None:
    """A forward pass with an adapter. Raises `Unsupported`: no engine has adapters yet."""
    _refuse("Adapter", "forward_with_adapter: no engine of this server has adapters; use forward with merged weights")


def _refuse(trait: str, message: str) -> NoReturn:
    raise Unsupported(message, trait)
