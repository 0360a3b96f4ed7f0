"""The interface to what answers calls of models."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from weft.workflow.graph.values import PartRanges
from weft.workflow.run.calls import CallBound, ModelAnswer, ModelRequest, PromptFound

NOTHING_KNOWN = PromptFound()


class CallProgress(Protocol):
    """Told how a call goes on. It is called when the model begins, at the latest before the answer; only the first time
    counts."""

    wants_text: bool
    """Whether the text is to be told as it is generated."""

    def __call__(self, start: PromptFound = NOTHING_KNOWN) -> None:
        """The model begins."""
        ...

    def first_token(self) -> None:
        """The first token of the answer has come, so the KV of the whole prompt is there. Models of this process alone
        tell it."""
        ...

    def text(self, piece: str) -> None:
        """A further piece of the answer's text."""
        ...


class ModelBackend(Protocol):
    """Answers calls of models. Calls may overlap; cancelling one's task cancels its generation."""

    async def complete(self, request: ModelRequest, started: CallProgress) -> ModelAnswer:
        """Answer a request, telling `started` how it goes on. Raises `WeftError`: `Overloaded` and `EngineDead` where
        another try makes sense."""
        ...

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        """Parts of a text by the model's tokens: `ranges` takes where they end and where characters do, and gives
        where each part is. Raises `Unsupported` where tokens cannot be counted."""
        ...


@runtime_checkable
class BoundsCalls(Protocol):
    """A backend that can count the tokens of a prompt before its call."""

    async def call_bound(self, request: ModelRequest) -> CallBound | None:
        """The most tokens that a call may use; None where the model's tokenizer is not known. Raises `WeftError`."""
        ...


@runtime_checkable
class NamesModels(Protocol):
    """A backend that knows its models by their names alone: answers of one name are those of one model."""

    async def model_of(self, request: ModelRequest) -> str:
        """The name of the model that answers a request. Raises `WeftError` where it is not known."""
        ...


@runtime_checkable
class KnowsTokens(Protocol):
    """A backend that has the tokenizer and the chat template of its models."""

    async def prompt_digest(self, request: ModelRequest) -> str:
        """A digest of the token ids of a request's prompt. Raises `WeftError` where the request has none."""
        ...
