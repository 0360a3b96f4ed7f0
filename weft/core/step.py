"""A step: everything one launch on the device does, as data.

The scheduler writes steps, workers carry them out, and several workers may receive the same one, so a step holds only
numbers. The order of effects inside a step is fixed:

    swap_outs, page_copies, token_copies, swap_ins, slot_sets, embed, forward, head, sampling

so a page that is swapped out may be overwritten by the same step, and a page that is copied may be written by it. In
the forward, each layer writes all KV of the batch before any attention reads.

Swap-ins are in place before the forward of the next step, and the link works beside this step's forward. A forward that
reads or writes a page which its own step brings in is right too, but waits for the link.

Shapes use: T query tokens, R rows (one contiguous run of query tokens of one sequence), K (row, page) entries,
O output rows, S samplers, V vocabulary, P page size. Indices are int32, -1 means "none".
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from weft.core.sampling import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

MAX_PAGE_SIZE = 32
"""A visibility word has one bit per token of a page and is 32 bits wide."""
MAX_SCORE_ROWS = 512
"""Output rows of one step for log-probabilities of prompts, which bounds their memory: over a vocabulary of 152,000
tokens 0.3 GB in float32, beside those in the model's dtype."""


NO_INTS: I32 = np.empty(0, np.int32)
"""int32 [0], the default of optional columns. Shared: an array without entries cannot be written."""
NO_PAIRS: I32 = np.empty((0, 2), np.int32)
"""int32 [0, 2], likewise."""


class SlotSet(msgspec.Struct, frozen=True):
    """The sampling state of a sequence, placed in a device slot before the step samples.

    `prompt` and `output` are packed token ids and are empty unless the parameters have penalties or bad words (a bad
    word may begin in the prompt). `stop_ids` are the tokens that must not be sampled while a sampler's `suppress_stop`
    is set.
    """

    slot: int
    params: SamplingParams
    prompt: bytes = b""
    output: bytes = b""
    stop_ids: list[int] = []


class EmbedBatch(msgspec.Struct, frozen=True):
    """Writes the input embeddings of `token_ids` [E] into embedding slots `slots` [E]."""

    token_ids: I32
    slots: I32


class ForwardBatch(msgspec.Struct, frozen=True):
    """One ragged forward pass over R rows.

    A query token's input is, in this order: `token_ids[t]` if >= 0; else the token last sampled into device slot
    `token_slots[t]` if >= 0; else the hidden vector in embedding slot `embed_slots[t]`.

    Query token i (0-based) of a row with q query tokens and `kv_lens` k sees KV entry s of the row's pages, counted
    from the start of its page list, when all of these hold:
      - s < k;
      - causal rows: s <= k - q + i (the row's own writes are the last q of its k entries);
      - the bit `s % P` of the entry's visibility word is set (all ones when `visibility` is None);
      - its bit in the row's packed mask is set (where the row has one);
      - layers with a sliding window w: positions[t] - s < w. Such rows hold KV entry s at position s.
    """

    token_ids: I32
    """[T]"""
    positions: I32
    """[T] for the rotary embedding."""
    write_slots: I32
    """[T] `page * P + offset` where the token's KV is written; -1: nowhere."""
    q_indptr: I32
    """[R + 1] row r owns query tokens q_indptr[r] to q_indptr[r + 1]."""
    kv_indptr: I32
    """[R + 1] row r owns entries kv_indptr[r] to kv_indptr[r + 1] of `kv_page_ids`."""
    kv_page_ids: I32
    """[K] device pages."""
    kv_lens: I32
    """[R] KV entries of the row, its own writes included."""
    token_slots: I32 | None = None
    """[T] or None when every input is in `token_ids`."""
    embed_slots: I32 | None = None
    """[T] or None when no input is an embedding."""
    causal: Bool | None = None
    """[R] or None when every row is causal."""
    visibility: U32 | None = None
    """[K] bit s of a word: token s of the page is visible to the row. None: all are."""
    mask_bits: npt.NDArray[np.uint8] | None = None
    """Packed little-endian boolean masks, [q, k] row-major with each query's k bits padded to whole bytes."""
    mask_indptr: I32 | None = None
    """[R + 1] byte ranges of `mask_bits`; an empty range means the row has no mask."""
    output_tokens: I32 = NO_INTS
    """[O] query tokens whose hidden state goes to the language-model head: the first output rows."""
    hidden_tokens: I32 = NO_INTS
    """[H] query tokens whose final (normed) hidden state is summed into `hidden_groups`."""
    hidden_groups: I32 = NO_INTS
    """[H] index of the sum each one belongs to, 0 to G - 1."""
    store_tokens: I32 = NO_INTS
    """[W] query tokens whose final hidden state is written to embedding slots."""
    store_slots: I32 = NO_INTS
    """[W] those slots."""

    def touches(self, pages: I32, page_size: int, num_pages: int) -> bool:
        """Whether it reads or writes one of these device pages, of `num_pages` in all."""
        found = np.zeros(num_pages, np.bool_)
        found[pages] = True
        written = self.write_slots[self.write_slots >= 0] // page_size
        return bool(found[self.kv_page_ids].any() or found[written].any())

    def kv_tokens(self, page_size: int, rows: list[int] | None = None) -> int:
        """KV entries of these rows, None: of all. A page that several have counts once: as a full one, unless it is the
        last of all of them."""
        bounds, lengths, pages = self.kv_indptr, self.kv_lens, self.kv_page_ids
        if rows is not None:
            kept = [pages[bounds[row] : bounds[row + 1]] for row in rows]
            lengths, pages = lengths[rows], np.concatenate([NO_INTS, *kept])
            bounds = np.cumsum([0, *map(len, kept)], dtype=np.int32)
        held = np.zeros(int(pages.max(initial=-1)) + 1, np.int32)
        some = lengths > 0
        ends, last = bounds[1:][some] - 1, (lengths[some] - 1) % page_size + 1
        held[pages[ends]] = last
        is_full = np.ones(len(pages), np.bool_)
        is_full[ends] = last == page_size
        held[pages[is_full]] = page_size
        return int(held.sum())

    @property
    def num_tokens(self) -> int:
        """T, the query tokens of the batch."""
        return int(self.q_indptr[-1])

    @property
    def num_rows(self) -> int:
        """R, the rows of the batch."""
        return len(self.q_indptr) - 1


class HeadBatch(msgspec.Struct, frozen=True):
    """Embedding slots [N] put through the language-model head: output rows O to O + N - 1, without a forward."""

    embed_slots: I32


class SamplingBatch(msgspec.Struct, frozen=True):
    """What is made of the output rows. A row may feed any number of samplers, scores and distributions.

    Sampling draws by inverting the cumulative distribution, in order of token id, at `uniforms`: the numbers come from
    the scheduler, so a token depends on its own request alone.
    """

    rows: I32
    """[S] the output row of each sampler."""
    slots: I32
    """[S] the device slot that holds the sampler's state and receives its token."""
    uniforms: F64
    """[S] in [0, 1)."""
    num_logprobs: I32
    """[S] -1: none; k: the chosen token's log-probability and the k most probable."""
    suppress_stop: Bool
    """[S] the slot's stop ids must not be sampled."""
    late_mask: Bool
    """[S] the sampler waits for a mask in `LateInputs`."""
    score_rows: I32 = NO_INTS
    """[C] output rows whose log-probability of a given token is wanted (prompt log-probabilities)."""
    score_targets: I32 = NO_INTS
    """[C] those tokens."""
    score_top: int = 0
    """How many of the most probable tokens each score reports as well."""
    dist_rows: I32 = NO_INTS
    """[D] output rows whose `dist_top` most probable tokens are returned."""
    dist_top: int = 0


class Step(msgspec.Struct, frozen=True):
    """One launch. Fields are described in the module's docstring and their own types; all default to nothing."""

    step_id: int
    swap_outs: I32 = NO_PAIRS
    """[n, 2] device page, host page."""
    page_copies: I32 = NO_PAIRS
    """[n, 2] source and destination device pages. No destination is another copy's source."""
    token_copies: I32 = NO_PAIRS
    """[n, 2] source and destination KV slots (`page * P + offset`)."""
    swap_ins: I32 = NO_PAIRS
    """[n, 2] host page, device page."""
    slot_sets: list[SlotSet] = []
    embed: EmbedBatch | None = None
    forward: ForwardBatch | None = None
    head: HeadBatch | None = None
    sampling: SamplingBatch | None = None

    @property
    def is_empty(self) -> bool:
        """Whether launching it would do nothing."""
        return (
            self.forward is None
            and self.head is None
            and self.embed is None
            and not self.slot_sets
            and not any(len(a) for a in (self.swap_outs, self.page_copies, self.token_copies, self.swap_ins))
        )


class LateInputs(msgspec.Struct, frozen=True):
    """What the sampling half needs and could not be known when the step was launched."""

    samplers: I32 = NO_INTS
    """[M] indices into the step's samplers."""
    masks: U32 = msgspec.field(default_factory=lambda: np.empty((0, 0), np.uint32))
    """[M, ceil(V / 32)] allowed tokens, bit v % 32 of word v // 32."""
    free: I32 = NO_INTS
    """Indices of samplers that waited, and whose tokens need no mask."""


class TopTokens(msgspec.Struct, frozen=True):
    """The most probable tokens of some rows: `ids` [n, k] and `logprobs` [n, k], most probable first."""

    ids: I32
    logprobs: F32


class StepResult(msgspec.Struct, frozen=True):
    """What a step brought back to the host."""

    step_id: int
    tokens: I32 = NO_INTS
    """[S] sampled tokens; -1 where the logits were NaN, or their largest was infinite."""
    logprobs: F32 | None = None
    """[S] of the sampled tokens, NaN where not asked for; None when no sampler asked."""
    ranks: I32 | None = None
    """[S] 1 for the most probable token, 0 where not asked for; with `logprobs`."""
    top: TopTokens | None = None
    """[S, k] with k the largest `num_logprobs` of the step, at most the vocabulary; id -1 where not asked for."""
    score_logprobs: F32 | None = None
    """[C]"""
    score_ranks: I32 | None = None
    """[C]"""
    score_top: TopTokens | None = None
    dist: TopTokens | None = None
    hidden_sums: F32 | None = None
    """[G, hidden size]"""
    device_s: float = 0.0
    """Seconds the step held the device."""


INVALID_NUMBERS = (
    "the model computed numbers that are NaN or infinite for this request: its weights hold such values, or its dtype "
    "overflows. Check the checkpoint, or serve it with dtype float32"
)
"""Message of `InvalidLogits`."""


def is_invalid(result: StepResult) -> bool:
    """Whether a step brought back numbers that are not finite: of the weights, or of a product that overflowed."""
    found = np.count_nonzero(result.tokens < 0)
    if result.score_logprobs is not None:
        found += np.count_nonzero(np.isnan(result.score_logprobs))
    if result.dist is not None:
        found += np.count_nonzero(np.isnan(result.dist.logprobs))
    if result.hidden_sums is not None:
        found += np.count_nonzero(~np.isfinite(result.hidden_sums))
    return bool(found)


class StepHandle(Protocol):
    """A launched step, whose result may still be on the device."""

    @property
    def step_id(self) -> int:
        """The `step_id` of the step that was launched."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is complete. Raises what the worker raised. May be called again."""
        ...
