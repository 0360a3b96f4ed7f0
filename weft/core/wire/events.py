"""Events: how operations go and end, and answers to commands on the engine."""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from weft.abi.errors import WeftError
from weft.core.wire.base import PROTOCOL_VERSION, EventBase
from weft.core.wire.errors import ErrorRecord
from weft.core.wire.info import EngineInfo, EngineStats, SessionInfo

FinishReason = Literal["stop", "length"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability, its rank (1 = most probable), and the most probable tokens at its place."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Token(EventBase, frozen=True):
    """The next token of a `Generate`."""

    op: int
    token: int
    hold_bytes: int = 0
    """How many of the last bytes generated so far may turn out to belong to a stop string: not to be shown yet."""
    logprobs: TokenLogprobs | None = None


class Dists(msgspec.Struct, frozen=True, array_like=True):
    """Distributions of n next tokens under the model itself, packed, most probable tokens first."""

    packed_ids: bytes
    """int32 [n, k]"""
    packed_logprobs: bytes
    """float32 [n, k]"""
    packed_targets: bytes = b""
    """float32 [n, t]: log-probabilities of t given tokens each."""

    @property
    def ids(self) -> list[int]:
        """Token ids, flattened from [n, k]."""
        return array("i", self.packed_ids).tolist()

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities, flattened from [n, k]."""
        return array("f", self.packed_logprobs).tolist()

    @property
    def targets(self) -> list[float]:
        """Log-probabilities of given tokens, flattened from [n, t]."""
        return array("f", self.packed_targets).tolist()


class OperationUsage(msgspec.Struct, frozen=True, array_like=True):
    """What an operation cost. Times are seconds on the engine's clock."""

    num_prompt_tokens: int = 0
    """Tokens the sequence held when the operation began."""
    num_cached_tokens: int = 0
    """Of those, tokens whose KV was found instead of computed, on the device or the host; KV that the sequence had
    before the operation among them."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    """From arrival to the first launch."""
    first_token_s: float = 0.0
    """From arrival to the first token."""
    total_s: float = 0.0
    """From arrival to the end."""
    num_host_tokens: int = 0
    """Of the cached ones, tokens whose KV was brought from the host."""
    num_recomputed_tokens: int = 0
    """Prompt tokens that were computed although their KV had existed: it was given up."""
    first_different_token: int | None = None
    """Where the sequence continues a finished turn, the first of its tokens that differs from that turn's; None: it has
    the whole turn, continues none, or KV behind that token was found."""
    num_continued_tokens: int = 0
    """Of the cached ones, those of what the sequence goes on from: of the prompt and the answer of the finished turn
    that it continues, or of its own and its parent's KV. Those behind it, and of prefixes that are merely alike, are
    not."""
    num_prefill_tokens: int = 0
    """Known tokens that went through a forward since the operation before ended, recomputation included. Of operations
    that have ended these add up to the engine's counter."""

    def with_prompt_of(self, other: OperationUsage) -> OperationUsage:
        """This usage, and of `other` where the KV of the prompt came from."""
        return msgspec.structs.replace(
            self,
            num_cached_tokens=other.num_cached_tokens,
            num_host_tokens=other.num_host_tokens,
            num_recomputed_tokens=other.num_recomputed_tokens,
            first_different_token=other.first_different_token,
            num_continued_tokens=other.num_continued_tokens,
            num_prefill_tokens=self.num_prefill_tokens + other.num_prefill_tokens,
        )

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that were neither found nor known to have had KV: computed for the first time, or not at all
        where the operation was cancelled before."""
        return self.num_prompt_tokens - self.num_cached_tokens - self.num_recomputed_tokens


class Started(EventBase, frozen=True, kw_only=True):
    """A `Generate` with `tells_start` runs for the first time. It comes once, before its first token."""

    op: int
    num_prompt_tokens: int = 0
    """As the fields of these names of `OperationUsage`."""
    num_cached_tokens: int = 0
    num_continued_tokens: int = 0
    queued_s: float = 0.0


class Finished(EventBase, frozen=True, kw_only=True):
    """An operation ended without an error."""

    op: int
    reason: FinishReason = "stop"
    stop: str | int | None = None
    """The stop string or stop token that ended it; None for end-of-sequence and length."""
    cut_bytes: int = 0
    """How many of the last bytes generated are the stop string and what follows it."""
    usage: OperationUsage = OperationUsage()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per appended token; None for the first token of a sequence, which nothing predicts."""
    hidden: list[float] | None = None
    """[hidden size]"""
    dists: Dists | None = None
    """Of a `NextDist`, or of an `Append` that asked for one."""
    tokens: bytes = b""
    """Packed int32: what a `ForwardSample` drew."""
    count: int = 0
    """Pages of an `ImportPages`, or those that a command on residency was carried out for."""


class Failed(EventBase, frozen=True, kw_only=True):
    """An operation ended with an error, or a command could not be carried out (`op` 0 where it has no number)."""

    op: int
    error: ErrorRecord
    usage: OperationUsage = OperationUsage()

    @classmethod
    def of(cls, op: int, error: WeftError, usage: OperationUsage | None = None) -> Failed:
        """The event of an error."""
        return cls(op=op, error=ErrorRecord.of(error), usage=usage or OperationUsage())


LEASE_ENDED = "lease_s"
"""`param` of the `UnknownHandle` that ends the operations of a client whose lease ended."""


class Cancelled(EventBase, frozen=True, kw_only=True):
    """An operation was ended by its client."""

    op: int
    usage: OperationUsage = OperationUsage()


class Welcome(EventBase, frozen=True, kw_only=True):
    """Answer to `Hello`: the engine's description."""

    info: EngineInfo
    version: int = PROTOCOL_VERSION


class Loading(EventBase, frozen=True):
    """An engine that is starting reads its weights: `done` of `total` bytes."""

    done: int
    total: int


class Stats(EventBase, frozen=True, kw_only=True):
    """Answer to `Ping`: the engine's counters."""

    stats: EngineStats


class Sessions(EventBase, frozen=True, kw_only=True):
    """Answer to `ListSessions`: those that wait longest."""

    query: int
    sessions: list[SessionInfo]
    total: int
    """How many there are, those that are left out included."""


class Drained(EventBase, frozen=True, kw_only=True):
    """Answer to `Drain`: no client holds anything any more."""


class TraceSpan(EventBase, frozen=True):
    """A moment in a request's life, sent when the engine traces: queued, scheduled (`detail` tokens have KV already),
    continued (of these, so many from the sequence itself, its parent or a finished turn), chunk, first_token,
    preempted, and how it ended. `at_s` is on the engine's clock."""

    request_id: str
    what: str
    at_s: float
    detail: int = 0


OpEvent = Token | Started | Finished | Failed | Cancelled
Event = OpEvent | Welcome | Loading | Stats | Sessions | Drained | TraceSpan
