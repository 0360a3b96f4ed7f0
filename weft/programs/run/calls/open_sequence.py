"""A sequence of a run, a generation as its program asked for it, and what all sequences of the run used.

Owns nothing but these values; the Sequence trait and its generations share them.
"""

from __future__ import annotations

import msgspec

from weft.core.grammar import Grammar
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import OperationUsage
from weft.programs.quota.page_quota import PageQuota
from weft.programs.sequence import SequenceHandle


class GenerateSpec(msgspec.Struct, frozen=True):
    """A generation as asked for, decoded and checked."""

    sampling: SamplingParams
    stop: StopParams
    grammar: Grammar | None


class OpenSequence:
    """A sequence that the program holds."""

    __slots__ = ("cached_tokens", "quota", "sequence")

    def __init__(self, sequence: SequenceHandle, quota: PageQuota):
        self.sequence = sequence
        self.quota = quota
        self.cached_tokens = 0


class SequenceUsage:
    """Tokens of all sequences of a run."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Appended so far."""
        self.cached_tokens = 0
        """Of all prompts, tokens whose KV was found instead of computed."""
        self.generated_tokens = 0

    def note(self, known: OpenSequence, usage: OperationUsage) -> None:
        """An operation has ended; its usage counts cached tokens since its sequence was opened."""
        self.cached_tokens += max(0, usage.num_cached_tokens - known.cached_tokens)
        known.cached_tokens = max(known.cached_tokens, usage.num_cached_tokens)
