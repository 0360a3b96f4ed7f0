"""The interface to what answers calls of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weft.workflow.run.calls import ModelAnswer, ModelRequest


class ModelBackend(Protocol):
    """Answers calls of models. Calls may overlap; cancelling one's task cancels its generation."""

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        """Answer a request. `started` is called once when the model begins with it, at the latest before this returns.
        Raises `WeftError`: `Overloaded` and `EngineDead` where another try makes sense."""
        ...

    async def split(self, text: str, ranges: Callable[[int], list[tuple[int, int]]]) -> list[str]:
        """Parts of a text by the model's tokens: `ranges` takes their number and gives the first and the last
        (exclusive) of each part. Raises `Unsupported` where tokens cannot be counted."""
        ...
