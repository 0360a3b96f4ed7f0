"""A sequence of a run, a generation as its program asked for it, and what all sequences of the run used.

Owns nothing but these values; the Sequence trait and its generations share them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.abi.errors import WeftError
from weft.core.grammar import Grammar
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import OperationUsage
from weft.programs.lasting import LastingSequence
from weft.programs.quota.page_quota import PageQuota


class GenerateSpec(msgspec.Struct, frozen=True):
    """A generation as asked for, decoded and checked."""

    sampling: SamplingParams
    stop: StopParams
    grammar: Grammar | None


class RefusedAppend(NamedTuple):
    """An append that the host has refused. What the program has put on the sequence before it took the error is refused
    too: it would be of another prompt."""

    error: WeftError
    num_takes: int
    """As of `PendingCalls`, then."""


class OpenSequence:
    """A sequence that the program holds."""

    __slots__ = ("num_settled", "quota", "refusal", "sequence")

    def __init__(self, sequence: LastingSequence, quota: PageQuota, num_settled: int = 0):
        self.sequence = sequence
        self.quota = quota
        self.num_settled = num_settled
        """Tokens that it had when its last operation ended, or when it was forked: their KV is found for no prompt."""
        self.refusal: RefusedAppend | None = None
        """Of the last append that was refused."""

    def truncate(self, num_tokens: int) -> None:
        """Its tokens past the first `num_tokens` are forgotten."""
        self.quota.truncate(num_tokens)
        self.num_settled = min(self.num_settled, num_tokens)


class SequenceUsage:
    """Tokens of all sequences of a run."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Appended so far."""
        self.cached_tokens = 0
        """Of all prompts, tokens whose KV was found instead of computed."""
        self.host_tokens = 0
        """Tokens whose KV was brought back from the host, in all operations."""
        self.recomputed_tokens = 0
        """Tokens computed again, in all operations."""
        self.generated_tokens = 0

    def note(self, known: OpenSequence, usage: OperationUsage) -> None:
        """An operation has ended. What it found beyond the sequence's own KV was found for a prompt."""
        self.cached_tokens += max(0, usage.num_cached_tokens - known.num_settled)
        self.host_tokens += usage.num_host_tokens
        self.recomputed_tokens += usage.num_recomputed_tokens
        if usage.num_prompt_tokens:
            known.num_settled = usage.num_prompt_tokens + usage.num_output_tokens
