"""What a client says to an engine, and what it hears back: the one wire format, in process and over sockets.

A client opens **sequences** and puts **operations** on them. Operations of one sequence run in order; sequences run
beside each other. The client chooses the numbers of its sequences and operations, so nothing has to be waited for; a
number may be used once. Every `Append` with outputs and every `Generate` ends in exactly one of `Finished`, `Failed`
or `Cancelled`; an operation without outputs is silent unless it fails. All events of one step for one client travel
in one message.

Below sequences there are **spaces**: KV pages and embeddings that the client names and fills itself, by commands on
**queues**. Commands of one queue run in order; those of different queues of a space are ordered by `Sync` alone.

Handles belong to (client, tenant) and die with the client's lease.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from weft.core.errors import InvalidRequest
from weft.core.grammar import Grammar
from weft.core.sampling import MAX_LOGPROBS, SamplingParams, StopParams

PROTOCOL_VERSION = 3

FinishReason = Literal["stop", "length"]
MAX_DIST = 4096
"""Tokens of a distribution that is sent to a client, at most."""


class _Command(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, array_like=True):
    pass


class Open(_Command, frozen=True, kw_only=True):
    """Create an empty sequence. Its pages may be shared within `namespace`, never across."""

    seq: int
    tenant: str = ""
    namespace: str = ""
    """Tenant or salt, joined with the adapter: sequences of different namespaces never share a page."""
    priority: int = 0
    """Lower runs earlier. Waiting improves it, so every request is served."""
    request_id: str = ""
    """For logs and traces."""


class PromptOutputs(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
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
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}", "logprobs")
        if self.dist is not None and not 1 <= self.dist <= min(vocab_size, MAX_DIST):
            most = min(vocab_size, MAX_DIST)
            raise InvalidRequest(f"a distribution has between 1 and {most} tokens here, got {self.dist}", "dist")


class Append(_Command, frozen=True, kw_only=True):
    """Add known tokens. They are computed as budget allows, the last one when something needs its logits.

    With `outputs`, even empty ones, the operation is reported when all but the last token are computed.
    """

    seq: int
    op: int
    tokens: bytes
    """Packed little-endian int32."""
    outputs: PromptOutputs | None = None


class Generate(_Command, frozen=True, kw_only=True):
    """Sample tokens until something in `stop` holds. One message per step brings the tokens of everyone."""

    seq: int
    op: int
    sampling: SamplingParams = SamplingParams()
    stop: StopParams = StopParams()
    grammar: Grammar | None = None
    """What the generated text must look like. The end of sequence is possible only where the text is complete."""


class Fork(_Command, frozen=True, kw_only=True):
    """Create `child` as a copy of `seq`, in its order among the operations of `seq`. All pages are shared."""

    seq: int
    child: int
    request_id: str = ""


class Truncate(_Command, frozen=True, kw_only=True):
    """Forget all tokens past the first `num_tokens`. Ends a running operation with `Cancelled`."""

    seq: int
    num_tokens: int


class Hold(_Command, frozen=True, kw_only=True):
    """Give the sequence up but keep its KV, partial page included, for whoever next opens a sequence of the same
    namespace that starts with the same tokens. It may be evicted at any time, and is after `ttl_s` seconds."""

    seq: int
    ttl_s: float


class Release(_Command, frozen=True, kw_only=True):
    """Give the sequence up. Operations under way end with `Cancelled`; its pages are free within one step."""

    seq: int


class Cancel(_Command, frozen=True, kw_only=True):
    """End the operations of the sequence with `Cancelled`; the sequence keeps the tokens it has."""

    seq: int


class OpenSpace(_Command, frozen=True, kw_only=True):
    """Create an empty space of pages and embeddings. `reserve_pages` are its own from now on, used or not."""

    space: int
    op: int
    tenant: str = ""
    namespace: str = ""
    """Exports are found within it, never across."""
    priority: int = 0
    request_id: str = ""
    reserve_pages: int = 0


class CloseSpace(_Command, frozen=True, kw_only=True):
    """Give everything in the space up. Commands under way end with `Cancelled`; exports stay."""

    space: int


class _OnQueue(_Command, frozen=True, kw_only=True):
    space: int
    queue: int
    op: int


class OpenQueue(_OnQueue, frozen=True, kw_only=True):
    """Create a queue of commands."""

    priority: int = 0
    """Added to the space's; lower runs earlier."""


class CloseQueue(_OnQueue, frozen=True, kw_only=True):
    """Forget a queue, once what is on it has run."""


class SetQueuePriority(_OnQueue, frozen=True, kw_only=True):
    """Change a queue's priority, at once."""

    priority: int


class Sync(_OnQueue, frozen=True, kw_only=True):
    """Ends with `Finished` when everything put on the queue before is done."""


class AllocPages(_OnQueue, frozen=True, kw_only=True):
    """Pages numbered `first` to `first + count - 1`. Ends with `Finished`, or fails with `OutOfPages` after a bounded
    wait."""

    first: int
    count: int


class FreePages(_OnQueue, frozen=True, kw_only=True):
    """Give pages back."""

    pages: bytes
    """Packed uint32, as all lists of pages and embeddings."""


class AllocEmbeds(_OnQueue, frozen=True, kw_only=True):
    """Embeddings numbered `first` to `first + count - 1`: room for one vector each. Ends like `AllocPages`."""

    first: int
    count: int


class FreeEmbeds(_OnQueue, frozen=True, kw_only=True):
    """Give embeddings back."""

    embeds: bytes


class CopyTokens(_OnQueue, frozen=True, kw_only=True):
    """Copy the KV of `count` tokens from one page to free places of another, positions included."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    count: int


class MaskPage(_OnQueue, frozen=True, kw_only=True):
    """Hide token s of the page from whoever reads it through this handle where bit s of `hidden` is set; show the
    others."""

    page: int
    hidden: int


class EmbedText(_OnQueue, frozen=True, kw_only=True):
    """Write the input embeddings of tokens, which stand at `positions`, into `embeds`."""

    tokens: bytes
    positions: bytes
    """Packed int32."""
    embeds: bytes


class Forward(_OnQueue, frozen=True, kw_only=True):
    """Put `inputs` through the model. Each sees the tokens of the pages to `read` and all inputs, as far as their
    positions are not after its own, or as `mask` says. Their KV goes to the first free places of `write`, if any; the
    final hidden states of the last inputs go to `outputs`."""

    read: bytes
    inputs: bytes
    write: bytes = b""
    outputs: bytes = b""
    mask: bytes = b""
    """Packed little-endian bits, [inputs, tokens of `read` in their order + inputs], each row padded to whole bytes."""


class ForwardSample(_OnQueue, frozen=True, kw_only=True):
    """As `Forward`, from token ids, and sample what follows the last one: `Finished.tokens`."""

    read: bytes
    tokens: bytes
    positions: bytes
    write: bytes = b""
    mask: bytes = b""
    sampling: SamplingParams = SamplingParams()
    index: int = 0
    """The number of the token among those drawn with the same seed."""


class NextDist(_OnQueue, frozen=True, kw_only=True):
    """The `k` most probable tokens after each of `embeds` [n], which hold final hidden states, and the
    log-probabilities of given ones: `Finished.dists`."""

    k: int
    embeds: bytes
    targets: bytes = b""
    """Packed int32 [n, t]."""


class ExportPages(_OnQueue, frozen=True, kw_only=True):
    """Keep pages, as they are then, under a name, for any space of the namespace to import. They outlive the space;
    when room is short, those not used for longest go."""

    pages: bytes
    name: str


class ImportPages(_OnQueue, frozen=True, kw_only=True):
    """Pages `first` and on, with the KV exported under a name: `Finished.count`. Shared until somebody writes."""

    first: int
    name: str


class ReleaseExport(_OnQueue, frozen=True, kw_only=True):
    """Forget what was exported under a name."""

    name: str


class MaskTokens(_Command, frozen=True, kw_only=True):
    """Hide ranges of tokens from all that is appended and generated from now on, in place of what was hidden before.
    None: everything is seen again. What is computed under a mask is not shared with other sequences."""

    seq: int
    op: int
    ranges: bytes = b""
    """Packed int32 pairs: first token, and past the last."""


class SetPriority(_Command, frozen=True, kw_only=True):
    """Change a sequence's priority."""

    seq: int
    priority: int


class Hello(_Command, frozen=True, kw_only=True):
    """First message of a client over a socket; answered with `Welcome`."""

    version: int = PROTOCOL_VERSION


class Ping(_Command, frozen=True, kw_only=True):
    """Renews the client's lease; answered with `Stats`."""


class Drain(_Command, frozen=True, kw_only=True):
    """Take no new sequences; answered with `Drained` when the last one is gone."""


class ResetPrefixCache(_Command, frozen=True, kw_only=True):
    """Forget every cached page that no sequence uses."""


Command = (
    Open
    | Append
    | Generate
    | Fork
    | Truncate
    | Hold
    | Release
    | Cancel
    | SetPriority
    | MaskTokens
    | OpenSpace
    | CloseSpace
    | OpenQueue
    | CloseQueue
    | SetQueuePriority
    | Sync
    | AllocPages
    | FreePages
    | AllocEmbeds
    | FreeEmbeds
    | CopyTokens
    | MaskPage
    | EmbedText
    | Forward
    | ForwardSample
    | NextDist
    | ExportPages
    | ImportPages
    | ReleaseExport
    | Hello
    | Ping
    | Drain
    | ResetPrefixCache
)

QueueCommand = (
    CloseQueue
    | SetQueuePriority
    | Sync
    | AllocPages
    | FreePages
    | AllocEmbeds
    | FreeEmbeds
    | CopyTokens
    | MaskPage
    | EmbedText
    | Forward
    | ForwardSample
    | NextDist
    | ExportPages
    | ImportPages
    | ReleaseExport
)
SpaceCommand = OpenSpace | CloseSpace | OpenQueue | QueueCommand
Answered = Sync | AllocPages | AllocEmbeds | ForwardSample | NextDist | ExportPages | ImportPages | ReleaseExport
"""Commands on queues that end in exactly one of `Finished`, `Failed` or `Cancelled`; others are silent unless they
fail."""


def is_answered(command: Command) -> bool:
    """Whether a command is an operation that ends in exactly one event."""
    if isinstance(command, Append):
        return command.outputs is not None
    return isinstance(command, Generate | Answered)


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, array_like=True):
    pass


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability, its rank (1 = most probable), and the most probable tokens at its place."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Token(_Event, frozen=True):
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
        """[n * k]"""
        return array("i", self.packed_ids).tolist()

    @property
    def logprobs(self) -> list[float]:
        """[n * k]"""
        return array("f", self.packed_logprobs).tolist()

    @property
    def targets(self) -> list[float]:
        """[n * t]"""
        return array("f", self.packed_targets).tolist()


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What an operation cost. Times are seconds on the engine's clock."""

    num_prompt_tokens: int = 0
    """Tokens the sequence held when the operation began."""
    num_cached_tokens: int = 0
    """Of those, tokens whose KV was found instead of computed, since the sequence was opened."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    """From arrival to the first launch."""
    first_token_s: float = 0.0
    """From arrival to the first token."""
    total_s: float = 0.0
    """From arrival to the end."""


class Finished(_Event, frozen=True, kw_only=True):
    """An operation ended well."""

    op: int
    reason: FinishReason = "stop"
    stop: str | int | None = None
    """The stop string or stop token that ended it; None for end-of-sequence and length."""
    cut_bytes: int = 0
    """How many of the last bytes generated are the stop string and what follows it."""
    usage: Usage = Usage()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per appended token; None for the first token of a sequence, which nothing predicts."""
    hidden: list[float] | None = None
    """[hidden size]"""
    dists: Dists | None = None
    """Of a `NextDist`, or of an `Append` that asked for one."""
    tokens: bytes = b""
    """Packed int32: what a `ForwardSample` drew."""
    count: int = 0
    """Pages of an `ImportPages`."""


class Failed(_Event, frozen=True, kw_only=True):
    """An operation ended badly, or a command could not be carried out. `kind` is one of `weft.core.errors`."""

    op: int
    kind: str
    message: str
    param: str | None = None
    usage: Usage = Usage()
    retry_after_s: float | None = None
    """When it may be tried again, where the engine knows."""


class Cancelled(_Event, frozen=True, kw_only=True):
    """An operation was ended by its client."""

    op: int
    usage: Usage = Usage()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know of an engine. Constant while the engine lives."""

    model: str
    vocab_size: int
    hidden_size: int
    page_size: int
    num_device_pages: int
    num_host_pages: int
    max_context: int
    """Longest sequence, in tokens, prompt and output together."""
    max_running: int
    max_step_tokens: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    bytes_per_page: int
    pid: int = 0
    explicit_pages: bool = False
    """Whether there are spaces: not with sliding windows."""
    num_embeds: int = 0
    """Embeddings of all spaces together."""
    max_space_pages: int = 0
    """Device pages of all spaces together."""


class Welcome(_Event, frozen=True, kw_only=True):
    """Answers `Hello`."""

    info: EngineInfo
    version: int = PROTOCOL_VERSION


class HistogramPicture(msgspec.Struct, frozen=True, array_like=True):
    """A frozen `weft.metrics.Histogram`."""

    bounds: tuple[float, ...]
    counts: list[int]
    """[len(bounds) + 1] observations of each bucket alone."""
    total: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen picture of an engine. Counters grow for the engine's life; gauges are of this moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_sequences: int = 0
    num_spaces: int = 0
    space_pages: int = 0
    """Device pages in spaces, reserved ones and exports included."""
    device_pages_total: int = 0
    device_pages_free: int = 0
    device_pages_cached: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    steps: int = 0
    step_device_s: float = 0.0
    """Summed device time of all steps."""
    step_host_s: float = 0.0
    """Summed time the loop spent scheduling, building and updating."""
    prompt_tokens: int = 0
    """Prompt tokens of operations that began, cached or not."""
    prefill_tokens: int = 0
    """Prompt tokens that went through a forward pass, recomputation included."""
    recomputed_tokens: int = 0
    """Of those, tokens that had been computed before and were discarded."""
    generated_tokens: int = 0
    space_tokens: int = 0
    """Inputs of forwards in spaces."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    evictions: int = 0
    """Pages evicted from the device tier."""
    swapped_in_pages: int = 0
    swapped_out_pages: int = 0
    finished: dict[str, int] = {}
    """Operations by how they ended: stop, length, cancelled, failed."""
    step_time: HistogramPicture | None = None
    """Seconds of a step on the device."""
    batch_size: HistogramPicture | None = None
    """Sequences in a step."""
    batch_tokens: HistogramPicture | None = None
    """Query tokens in a step."""
    cost_ratio: HistogramPicture | None = None
    """Measured to predicted time of steps; None without a cost profile."""
    cost_factor: float | None = None
    """What the profile's predictions are multiplied by now; None without one."""
    saturation_tokens: int | None = None
    """The saturation point of the profile; None without one."""


class Loading(_Event, frozen=True):
    """An engine that is starting reads its weights: `done` of `total` bytes."""

    done: int
    total: int


class Stats(_Event, frozen=True, kw_only=True):
    """Answers `Ping`."""

    stats: EngineStats


class Drained(_Event, frozen=True, kw_only=True):
    """Answers `Drain`."""


class TraceSpan(_Event, frozen=True):
    """A moment in a request's life, sent when the engine traces: queued, scheduled, chunk, first_token, preempted,
    finished. `at_s` is on the engine's clock."""

    request_id: str
    what: str
    at_s: float
    detail: int = 0


OpEvent = Token | Finished | Failed | Cancelled
Event = OpEvent | Welcome | Loading | Stats | Drained | TraceSpan


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """All events of one step for one client. Step 0: answers to commands, outside any step."""

    step_id: int
    events: list[Event]


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_envelope = msgspec.msgpack.Decoder(Envelope)


def encode_commands(commands: list[Command]) -> bytes:
    """Commands as one message."""
    return _encoder.encode(commands)


def decode_commands(data: bytes) -> list[Command]:
    """The inverse of `encode_commands`. Raises `msgspec.ValidationError` for anything else."""
    return _commands.decode(data)


def encode_envelope(envelope: Envelope) -> bytes:
    """An envelope as one message."""
    return _encoder.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """The inverse of `encode_envelope`. Raises `msgspec.ValidationError` for anything else."""
    return _envelope.decode(data)
