"""What calls of models took: of one, of a node, of a run. Figures alone, for those who count and those who show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAX_TRACED_CALLS = 20_000
"""Calls of a run that are kept, those of the rows that ended first; counts are of all."""


class CallUsage(NamedTuple):
    """Tokens of one call, as the model's server counts them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those whose KV was there."""
    output_tokens: int = 0
    continued_tokens: int = 0
    """Of the cached ones, those of the finished turn that the prompt continues: its prompt, and its answer as far as
    the prompt has it. 0 where the server does not say."""
    prefill_tokens: int = 0
    """Of the prompt, those that went through a forward; twice where they had to be computed twice."""


class CallCounts(NamedTuple):
    """What calls of models have done so far: of a run, or of one of its nodes."""

    calls: int = 0
    """Requests that were answered."""
    merged_calls: int = 0
    """Calls that had the answer of an equal one that was in flight."""
    cached_calls: int = 0
    """Calls that had the answer of an equal earlier one, from the prompt cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, those whose KV was there."""
    output_tokens: int = 0
    continued_tokens: int = 0
    """Of the cached ones, as in `CallUsage`."""
    prefill_tokens: int = 0
    """Of the prompts, those that went through a forward."""

    def plus(self, used: CallUsage, *, is_cached: bool) -> CallCounts:
        """With one more answer."""
        return CallCounts(
            self.calls + (not is_cached),
            self.merged_calls,
            self.cached_calls + is_cached,
            self.prompt_tokens + used.prompt_tokens,
            self.cached_tokens + used.cached_tokens,
            self.output_tokens + used.output_tokens,
            self.continued_tokens + used.continued_tokens,
            self.prefill_tokens + used.prefill_tokens,
        )


class PinCounts(NamedTuple):
    """What became of the prefixes that a run wanted to keep."""

    retained: int = 0
    """Times that an engine agreed to keep one."""
    tokens: int = 0
    """Of these, together."""
    broken: int = 0
    """Those that engines gave up before their time."""
    refused: int = 0
    refusal: str = ""
    """Why, the last time."""


class RunCounts(NamedTuple):
    """What a run has done so far."""

    rows: int = 0
    failed_rows: int = 0
    calls: CallCounts = CallCounts()
    by_node: Mapping[str, CallCounts] = {}
    """By the label of a node, such as `notes.summary`."""
    pins: PinCounts = PinCounts()
    """What engines were asked to keep."""


class CachedFigures(NamedTuple):
    """What the prompt cache has of a run that has not begun."""

    calls: Mapping[str, int]
    """Calls that have their answers, by the label of their node."""
    rows: int
    """Rows that make no call."""


class CallTrace(NamedTuple):
    """A call that was answered. Times are seconds since 1970; all 0: an answer of an earlier call."""

    path: str
    """Such as `notes[3].summary`."""
    node: str
    """The label: `notes.summary`."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those whose KV was there."""
    continued_tokens: int
    """Of these, as in `CallUsage`."""
    prefill_tokens: int
    """Of the prompt, those that went through a forward."""
    output_tokens: int
    sent_s: float
    started_s: float
    ended_s: float

    @property
    def queue_s(self) -> float:
        """From the sending to the model's beginning."""
        return self.started_s - self.sent_s

    @property
    def run_s(self) -> float:
        """From the model's beginning to the answer."""
        return self.ended_s - self.started_s


class RowTrace(NamedTuple):
    """The calls of a row that has ended."""

    row: int
    calls: tuple[CallTrace, ...]


class RunActuals(NamedTuple):
    """What a run has done."""

    counts: RunCounts
    seconds: float | None
    """From its first start to its end, or until now; None: it has not started."""
    rows: tuple[RowTrace, ...]
    """The calls of rows that have ended, `MAX_TRACED_CALLS` at most."""


def figures_of(counts: CallCounts, seconds: float | None = None) -> dict[str, float | None]:
    """Counts under the names of a plan's predictions: `cached_tokens` without those that are continued. What only a
    plan knows is None."""
    return {
        "calls": counts.calls,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens - counts.continued_tokens,
        "continued_tokens": counts.continued_tokens,
        "prefill_tokens": counts.prefill_tokens,
        "output_tokens": counts.output_tokens,
        "min_prefill_tokens": None,
        "token_steps": None,
        "seconds": seconds,
        "lower_bound_s": None,
    }
