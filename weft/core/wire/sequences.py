"""Commands on sequences: tokens appended, generated, forked, forgotten."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.grammar import Grammar
from weft.core.objectives import Objective
from weft.core.sampling import SamplingParams, StopParams, check_logprobs
from weft.core.wire.base import CommandBase

MAX_DIST = 4096
"""Tokens of a distribution that is sent to a client, at most."""


class Open(CommandBase, frozen=True, kw_only=True):
    """Create an empty sequence. Its pages may be shared within `namespace`, never across."""

    seq: int
    tenant: str = ""
    namespace: str = ""
    """Tenant or salt, joined with the adapter: sequences of different namespaces never share a page."""
    priority: int = 0
    """Lower runs earlier. Waiting improves it, so every request is served."""
    request_id: str = ""
    """For logs and traces."""
    objective: Objective = "latency"
    """What it, and its forks, are to be fast at (`weft.core.objectives`)."""
    deadline_s: float | None = None
    """With objective `deadline`: in how many seconds it should be done."""


class PromptOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What an `Append` reports about the tokens it adds. `logprobs` and `hidden` switch prefix reuse off for them,
    because cached tokens are not computed again."""

    logprobs: int | None = None
    """None: none. k >= 0: each appended token's log-probability and the k most probable tokens there."""
    hidden: Literal["mean", "last"] | None = None
    """Pooled final hidden state of the appended tokens, or that of the last one."""
    dist: int | None = None
    """k >= 1: the k tokens most likely to follow the sequence's last one. Tokens may then be empty."""

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequest`, naming the field, for what no engine reports."""
        if self.logprobs is not None:
            check_logprobs(self.logprobs, "logprobs")
        if self.dist is not None and not 1 <= self.dist <= min(vocab_size, MAX_DIST):
            most = min(vocab_size, MAX_DIST)
            raise InvalidRequest(f"a distribution has between 1 and {most} tokens here, got {self.dist}", "dist")


class Append(CommandBase, frozen=True, kw_only=True):
    """Add known tokens. They are computed as budget allows, the last one when something needs its logits.

    With `outputs`, even empty ones, the operation is reported when all but the last token are computed.
    """

    seq: int
    op: int
    tokens: bytes
    """Packed little-endian int32."""
    outputs: PromptOutputs | None = None


class Generate(CommandBase, frozen=True, kw_only=True):
    """Sample tokens until something in `stop` holds. One message per step brings the tokens of everyone."""

    seq: int
    op: int
    sampling: SamplingParams = SamplingParams()
    stop: StopParams = StopParams()
    grammar: Grammar | None = None
    """What the generated text must look like. The end of sequence is possible only where the text is complete."""
    num_generated: int = 0
    """How many of the sequence's last tokens are the beginning of this generation, sampled on an engine that has died.
    Grammar, stop strings, penalties, limits and random numbers go on behind them; only further tokens are reported."""
    tells_start: bool = False
    """Whether `Started` comes before the first token."""
    stream: int = 0
    """Of a generation without a seed: tells its random numbers from those of other generations on the sequence. It goes
    on with the same ones if it is sent again with the same number."""


class Fork(CommandBase, frozen=True, kw_only=True):
    """Create `child` as a copy of `seq`, in its order among the operations of `seq`. All pages are shared."""

    seq: int
    child: int
    request_id: str = ""


class Truncate(CommandBase, frozen=True, kw_only=True):
    """Forget all tokens past the first `num_tokens`. Ends a running operation with `Cancelled`."""

    seq: int
    num_tokens: int


class Hold(CommandBase, frozen=True, kw_only=True):
    """Give the sequence up but keep its KV, partial page included, for the next sequence of the same namespace
    that starts with the same tokens. It may be evicted at any time, and is after `ttl_s` seconds."""

    seq: int
    ttl_s: float
    op: int = 0
    """Not 0: it ends in `Finished`, with the number of pages that are held, or `Failed` where the KV cannot be held."""


class Release(CommandBase, frozen=True, kw_only=True):
    """Give the sequence up. Operations under way end with `Cancelled`; its pages are free within one step."""

    seq: int
    kind: str = ""
    """What its client does now, if it may come back with more tokens behind those of the sequence, such as `chat`: its
    pages stay findable until they are needed, the last one too. Empty: it does not come back."""
    expected_in_s: float | None = None
    """When it will come back, if that is known."""


class Expect(CommandBase, frozen=True, kw_only=True):
    """Say what a sequence waits for that has nothing to do, or will have nothing to do: the engine learns from the kind
    how long such waits take. Holds until its next operation."""

    seq: int
    kind: str
    """One of `weft.core.waits.WaitKind`; of simulated workloads, any name."""
    expected_in_s: float | None = None
    """When it will have something to do, if that is known."""
    op: int = 0
    """Not 0: it ends in `Finished` or `Failed`. 0: it is silent unless it fails."""


class Cancel(CommandBase, frozen=True, kw_only=True):
    """End the operations of the sequence with `Cancelled`; the sequence keeps the tokens it has."""

    seq: int


class SetPriority(CommandBase, frozen=True, kw_only=True):
    """Change the priority of a sequence; lower runs earlier."""

    seq: int
    priority: int


class MaskTokens(CommandBase, frozen=True, kw_only=True):
    """Hide ranges of tokens from all that is appended and generated from now on, in place of what was hidden before.
    None: everything is seen again. What is computed under a mask is not shared with other sequences."""

    seq: int
    op: int
    ranges: bytes = b""
    """Packed int32 pairs: first token, and past the last."""
