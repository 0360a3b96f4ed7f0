"""`PrefixKeeper`: has engines keep what `RunPins` wants kept, and releases it at every end of the run.

Owns the retains of one run. Nothing waits for an engine: a call never does for a retain, nor the end of a run. Pure, so
that simulated runs keep prefixes as served ones do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from weft.abi.errors import WeftError
from weft.programs.retains import OnRetained
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.instructions import CallModel
from weft.workflow.run.pins import KvPrefix
from weft.workflow.run.plan_rounds import PlanRounds
from weft.workflow.run.state import RunState


class KeptPrefix(Protocol):
    """A prefix that an engine was asked to keep."""

    def end(self) -> None:
        """Let go of it. Idempotent; never waits, and may be called at any time."""


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A backend whose engines keep KV of prefixes on request."""

    def retain(self, prefix: KvPrefix, pinned_part: float, told: OnRetained) -> KeptPrefix:
        """Keep what an engine has of a prefix, and tell later, not before this returns, what it keeps. All prefixes of
        a user hold at most `pinned_part` of its pages. Raises `WeftError`."""
        ...


class _Kept(NamedTuple):
    number: int
    """Of the request to keep it: the same prefix may be retained anew."""
    retain: KeptPrefix


class PrefixKeeper:
    """The retains of one run."""

    def __init__(self, rounds: PlanRounds, state: RunState, backend: KeepsPrefixes):
        """For the prefixes that the plans of a run pin; told by its state what has settled."""
        self._pins = rounds.pins
        self._backend = backend
        self._pinned_part = rounds.settings.pinned_part
        self._kept: dict[KvPrefix, _Kept] = {}
        self._numbers = itertools.count()
        self._pins.counts = state.pin_counts()
        state.pin_counts = lambda: self._pins.counts
        rounds.on_unpinned = self.end
        state.on_settled = self.has_settled

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
                kept.retain.end()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self.end(self._pins.close())
        self.end(list(self._kept))

    def _retain(self, prefixes: Iterable[KvPrefix]) -> None:
        for prefix in prefixes:
            number = next(self._numbers)
            try:
                kept = self._backend.retain(prefix, self._pinned_part, partial(self._outcome, prefix, number))
            except WeftError as error:
                self.end(self._pins.was_refused(prefix, error))
                continue
            self._kept[prefix] = _Kept(number, kept)

    def _outcome(self, prefix: KvPrefix, number: int, outcome: int | WeftError) -> None:
        kept = self._kept.get(prefix)
        if kept is None or kept.number != number:
            return
        if isinstance(outcome, WeftError):
            self.end([prefix, *self._pins.was_refused(prefix, outcome)])
        else:
            self._pins.was_retained(prefix, outcome)
