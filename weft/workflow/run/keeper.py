"""`PrefixKeeper`: has engines keep what `RunPins` wants kept, and releases it at every end of the run.

Owns the retains of one run. Nothing waits for an engine: a call never does for a retain, nor the end of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from weft.abi.errors import WeftError
from weft.workflow.actuals import PinCounts
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.instructions import CallModel
from weft.workflow.run.pins import KvPrefix, RunPins


class KeptPrefix(Protocol):
    """A prefix that an engine was asked to keep."""

    async def num_tokens(self) -> int:
        """Wait for the engine's answer: how many of the first tokens it keeps. Raises why it keeps none."""
        ...

    def end(self) -> None:
        """Let go of it. Idempotent; never waits, and may be called at any time."""


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A backend whose engines keep KV of prefixes on request."""

    def retain(self, prefix: KvPrefix, pinned_part: float) -> KeptPrefix:
        """Keep what an engine has of a prefix. All prefixes of a user hold at most `pinned_part` of its pages. Raises
        `WeftError`."""
        ...


class PrefixKeeper:
    """The retains of one run. Used from one event loop."""

    def __init__(self, pins: RunPins, backend: KeepsPrefixes, pinned_part: float):
        self._pins = pins
        self._backend = backend
        self._pinned_part = pinned_part
        self._kept: dict[KvPrefix, KeptPrefix] = {}
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> PinCounts:
        """What became of the prefixes so far."""
        return self._pins.counts

    def begins_with(self, call: CallModel) -> list[KvPrefix]:
        """What is kept now of the prompt of a call."""
        return self._pins.begins_with(call.site.label)

    def has_started(self, call: CallModel) -> None:
        """A call has its first token."""
        self._retain(self._pins.has_started(call.site.label))

    def was_answered(self, begun_with: Iterable[KvPrefix], answer: ModelAnswer) -> None:
        """A call has ended that began when these were kept."""
        if not answer.is_cached:
            lost = self._pins.was_answered(begun_with, answer.usage.cached_tokens)
            self.end(lost)
            self._retain(lost)

    def has_settled(self, row: int, node: str) -> None:
        """An outer node of a row has its value, or never will."""
        self.end(self._pins.has_settled(row, node))

    def has_ended(self, row: int) -> None:
        """A row has ended."""
        self.end(self._pins.has_ended(row))

    def end(self, prefixes: Iterable[KvPrefix]) -> None:
        """Let go of prefixes, as far as they are kept."""
        for prefix in prefixes:
            kept = self._kept.pop(prefix, None)
            if kept is not None:
                kept.end()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        for task in self._asking:
            task.cancel()
        self.end(self._pins.close())
        self.end(list(self._kept))

    def _retain(self, prefixes: Iterable[KvPrefix]) -> None:
        for prefix in prefixes:
            try:
                kept = self._backend.retain(prefix, self._pinned_part)
            except WeftError as error:
                self.end(self._pins.was_refused(prefix, error))
                continue
            self._kept[prefix] = kept
            task = asyncio.get_running_loop().create_task(self._outcome(prefix, kept))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _outcome(self, prefix: KvPrefix, kept: KeptPrefix) -> None:
        try:
            num_tokens = await kept.num_tokens()
        except WeftError as error:
            if self._kept.get(prefix) is kept:
                del self._kept[prefix]
                kept.end()
                self.end(self._pins.was_refused(prefix, error))
            return
        if self._kept.get(prefix) is kept:
            self._pins.was_retained(prefix, num_tokens)
