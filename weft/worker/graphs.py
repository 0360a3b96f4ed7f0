"""Forward passes as captured graphs: one launch instead of some hundreds.

Owns which steps are taken, the bucket that a step is padded to, and when a bucket's graph is captured or given up. The
pass reads nothing but `StaticInputs`, weights, KV and the tokens that slots sampled last, so one graph serves every
step of its bucket. A step whose tokens all give logits (decoding) is a graph up to these; another, with prompts, up to
the last layer's hidden states, because few of its tokens give logits. Drawing tokens stays outside: what is done there
depends on what requests ask for.

A bucket's first step runs without a graph, over the same inputs: that compiles its kernels, which nothing may do while
a graph is captured. The second step captures. The least recently used graph gives way when there are too many, and has
to be wanted twice as often before it is captured again. When a capture fails, there are no more captures: steps without
a graph run as ever, and one warning names the reason.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.core.step import ForwardBatch
from weft.kernels.work_items import Cuts, RowExtents, WorkItems, divide
from weft.models.base import LanguageModel, ModelSpec
from weft.worker.graphs_inputs import Bucket, StaticInputs, attention_batch

MAX_GRAPHS = 128
USES_BEFORE_CAPTURE = 2
MAX_SPLITS = 8192
"""Splits of a step: bounds the memory of their partial results. At 256 entries each, these are 2M tokens of context."""
SPLITS_OF_PROMPTS = (0, 64, 512, MAX_SPLITS)
"""What splits are padded to in steps that give no logits: few sizes, because each makes graphs of its own. A program
without work ends at once."""
TILES_OF_ROWS = (16, 64, 256)
"""Tiles beyond those that a step's tokens fill: each row may leave one that is not full."""
LAUNCH_BOUND = 6e12
"""Weights times tokens of the largest steps with prompts: others take the device longer to compute than the processor
to launch. A forward of 7e9 weights in 32 layers was launched in 10 to 19 ms on two hosts of an H100, which gets through
prompts of 420 to 800 tokens meanwhile."""
MAX_ENTRIES = 1 << 19
"""(row, page) entries of a step."""
GRAPH_BYTES = 2 << 20
"""Of one graph, outside of torch's memory; 20 graphs of 28 layers took 16 MiB on an H100."""
EVERY_VISIBLE = np.uint32(0xFFFFFFFF)

_log = logging.getLogger("weft.worker")


class Graph(Protocol):
    """A captured forward pass, to be replayed."""

    def replay(self) -> None:
        """Do it again, with what the inputs hold now."""
        ...


class GraphBackend(Protocol):
    """Captures forward passes of a device, and replays them."""

    def capture(self, body: Callable[[], None]) -> Graph:
        """Record `body`, which reads and writes tensors that stay where they are, and has run before with the same
        shapes. Whether it is also done does not matter: the caller replays. Raises the error that keeps
        it from being captured."""
        ...


class GraphOptions(NamedTuple):
    """How a worker uses graphs."""

    backend: GraphBackend
    cuts: Cuts
    """How the model's attention divides rows."""
    batch_sizes: tuple[int, ...]
    """Tokens that steps which give logits of all tokens are padded to; more run without."""
    step_sizes: tuple[int, ...] = ()
    """Tokens that other steps are padded to."""
    max_graphs: int = MAX_GRAPHS


class GraphCounts(NamedTuple):
    """What became of the steps that were taken."""

    captured: int
    replayed: int
    without: int
    """Padded to a bucket that had no graph yet."""


class StepGraphs:
    """The forward passes of one worker. Used by one thread."""

    def __init__(
        self,
        model: LanguageModel,
        kv: Sequence[Tensor],
        last_tokens: Tensor,
        options: GraphOptions,
        *,
        page_size: int,
        max_context: int,
    ):
        """`kv` is one tensor per layer, `last_tokens` [slots] int64 what each slot sampled last; both stay where they
        are."""
        self._model = model
        self._kv = kv
        self._last_tokens = last_tokens
        self._backend = options.backend
        self._cuts = options.cuts
        self._batch_sizes = sorted(set(options.batch_sizes))
        self._step_sizes = sorted(set(options.step_sizes))
        self._max_graphs = options.max_graphs
        self._page_size = page_size
        spec = model.spec
        rows, tokens = self._batch_sizes[-1], max(self._step_sizes, default=0)
        most = max(rows, tokens)
        self._max_entries = min(most * -(-max_context // page_size), MAX_ENTRIES)
        tiles = -(-tokens // self._cuts.tile_queries) + TILES_OF_ROWS[-1]
        largest = Bucket(most, max(MAX_SPLITS, rows), tiles, merges=most, gives_logits=True)
        self._inputs = StaticInputs(largest, self._max_entries, last_tokens.device)
        # One tensor for all graphs: results of its own for each would be most of their memory.
        self._logits = last_tokens.new_empty((rows, spec.vocab_size), dtype=_logits_dtype(spec))
        self._hidden = last_tokens.new_empty((tokens, spec.hidden_size), dtype=spec.dtype)
        self._graphs: OrderedDict[Bucket, Graph] = OrderedDict()
        self._uses: Counter[Bucket] = Counter()
        self._uses_needed: dict[Bucket, int] = {}
        self._captures = True
        self._counts = GraphCounts(0, 0, 0)

    @property
    def counts(self) -> GraphCounts:
        """What became of the steps that were taken."""
        return self._counts

    @property
    def buckets(self) -> list[Bucket]:
        """Those that have a graph, the least recently used first."""
        return list(self._graphs)

    def logits(self, forward: ForwardBatch) -> Tensor | None:
        """The logits of every token [T, V], with its KV written, of a step of which nothing else is asked.

        None, and nothing done, for a step that is not taken. The result is valid until the next call.
        """
        if not (is_plain(forward) and wants_logits_alone(forward)):
            return None
        return self._logits[: forward.num_tokens] if self._carry_out(forward, self._batch_bucket) else None

    def hidden(self, forward: ForwardBatch) -> Tensor | None:
        """The hidden states of every token after the last layer [T, hidden size], with its KV written.

        None, and nothing done, for a step that is not taken. The result is valid until the next call.
        """
        if not is_plain(forward):
            return None
        return self._hidden[: forward.num_tokens] if self._carry_out(forward, self._step_bucket) else None

    def _carry_out(self, forward: ForwardBatch, bucket_of: Callable[[int, WorkItems], Bucket | None]) -> bool:
        """Whether the step is taken; then it is done."""
        if not 0 < len(forward.kv_page_ids) <= self._max_entries:
            return False
        work = divide(RowExtents(forward.q_indptr, forward.kv_indptr, forward.kv_lens), self._cuts)
        bucket = bucket_of(forward.num_tokens, work)
        if bucket is None or not (self._captures or bucket in self._graphs):
            return False
        self._inputs.send(bucket, forward, work)
        graph = self._graph(bucket)
        if graph is None:
            self._counts = self._counts._replace(without=self._counts.without + 1)
            self._pass(bucket)
        else:
            self._counts = self._counts._replace(replayed=self._counts.replayed + 1)
            graph.replay()
        return True

    def _batch_bucket(self, tokens: int, work: WorkItems) -> Bucket | None:
        padded = _next(tokens, self._batch_sizes)
        if padded is None or len(work.tiles):
            return None
        splits = 2 * padded if len(work.merges) else padded
        while splits < max(len(work.splits), work.num_partials):
            splits *= 2
        if splits > max(MAX_SPLITS, padded):
            return None
        return Bucket(padded, splits, 0, merges=padded if len(work.merges) else 0, gives_logits=True)

    def _step_bucket(self, tokens: int, work: WorkItems) -> Bucket | None:
        padded = _next(tokens, self._step_sizes)
        if padded is None:
            return None
        full = -(-padded // self._cuts.tile_queries)
        splits = _next(max(len(work.splits), work.num_partials), SPLITS_OF_PROMPTS)
        spare = _next(max(0, len(work.tiles) - full), TILES_OF_ROWS) if len(work.tiles) else -full
        if splits is None or spare is None:
            return None
        return Bucket(padded, splits, full + spare, merges=min(splits, padded), gives_logits=False)

    def _graph(self, bucket: Bucket) -> Graph | None:
        """The bucket's graph, captured now if it is time."""
        graph = self._graphs.get(bucket)
        if graph is not None:
            self._graphs.move_to_end(bucket)
            return graph
        self._uses[bucket] += 1
        needed = self._uses_needed.setdefault(bucket, USES_BEFORE_CAPTURE)
        if self._uses[bucket] < needed:
            return None
        try:
            graph = self._backend.capture(lambda: self._pass(bucket))
        except Exception as error:  # every error of a device or a kernel: steps also run without graphs
            self._captures = False
            reason = f"{type(error).__name__}: {error}"
            _log.warning("CUDA graphs: no more are captured, steps are slower without (%s)", reason)
            return None
        self._graphs[bucket] = graph
        if len(self._graphs) > self._max_graphs:  # not before: a capture waits for those that still run
            given_up, _ = self._graphs.popitem(last=False)
            self._uses[given_up] = 0
            self._uses_needed[given_up] *= 2
        self._counts = self._counts._replace(captured=self._counts.captured + 1)
        return graph

    def _pass(self, bucket: Bucket) -> None:
        """One pass over what the static inputs hold, to the first rows of the logits or of the hidden states."""
        model, views = self._model, self._inputs.views(bucket)
        batch = attention_batch(views, self._page_size)
        known = views["token_ids"]
        x = model.embed(torch.where(known >= 0, known, self._last_tokens.index_select(0, views["token_slots"])))
        for index, layer in enumerate(model.layers):
            x = layer.forward(x, model.provider.layer(index), batch, self._kv[index])
        if bucket.gives_logits:
            self._logits[: bucket.tokens].copy_(model.head(model.final_norm(x)))
        else:
            self._hidden[: bucket.tokens].copy_(x)


def is_plain(forward: ForwardBatch) -> bool:
    """Whether each row sees all KV before it, and its tokens are known or were sampled into a slot."""
    return (
        forward.embed_slots is None
        and (forward.causal is None or bool(forward.causal.all()))
        and (forward.visibility is None or bool((forward.visibility == EVERY_VISIBLE).all()))
        and (forward.mask_bits is None or len(forward.mask_bits) == 0)
    )


def wants_logits_alone(forward: ForwardBatch) -> bool:
    """Whether all that is asked of the tokens are the logits of each, in order."""
    return (
        np.array_equal(forward.output_tokens, np.arange(forward.num_tokens))
        and len(forward.hidden_tokens) == 0
        and len(forward.store_tokens) == 0
    )


def _next(needed: int, sizes: Sequence[int]) -> int | None:
    """The least of these ascending sizes that suffices."""
    place = bisect_left(sizes, needed)
    return None if place == len(sizes) else sizes[place]


def _logits_dtype(spec: ModelSpec) -> torch.dtype:
    """See `models.base.LanguageModel.head`."""
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


def graph_bytes(spec: ModelSpec, options: GraphOptions) -> int:
    """About how much device memory graphs take: logits twice, once as the head gives them, a pass over the most tokens,
    partial results of attention, and what the driver keeps of each graph."""
    rows, tokens = max(options.batch_sizes), max(options.step_sizes, default=0)
    logits = rows * spec.vocab_size * (2 * _logits_dtype(spec).itemsize + spec.dtype.itemsize)
    of_token = 4 * spec.hidden_size + 3 * spec.intermediate_size + 3 * spec.num_heads * spec.head_dim
    partials = MAX_SPLITS * spec.num_heads * (spec.head_dim + 2) * 4
    return logits + tokens * of_token * spec.dtype.itemsize + partials + MAX_GRAPHS * GRAPH_BYTES


def default_batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 to 64, every 16 to 256 and every 64 to 512, as far as `most` reaches, which is the last."""
    sizes = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, 513, 64))
    return _up_to(min(most, sizes[-1]), sizes)


def default_step_sizes(spec: ModelSpec, most: int) -> tuple[int, ...]:
    """Every 16 to 256, then eight for each doubling, as far as `most`, 2,048 and `LAUNCH_BOUND` reach."""
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    weights = spec.num_layers * spec.hidden_size * (attention + 3 * spec.intermediate_size)
    sizes = (*range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1152, 2049, 128))
    return _up_to(min(most, int(LAUNCH_BOUND / weights), sizes[-1]), sizes)


def _up_to(last: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes below `last`, and it."""
    return (*(size for size in sizes if size < last), last)
