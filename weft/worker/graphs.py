"""Decode passes as captured graphs: one launch instead of some hundreds.

Owns which steps are taken, the bucket that a step is padded to, and when a bucket's graph is captured or given up. The
pass reads nothing but `StaticInputs`, weights, KV and the tokens that slots sampled last, so one graph serves every
step of its bucket. Drawing tokens stays outside: what is done there depends on what requests ask for.

A bucket's first step runs without a graph, over the same inputs: that compiles its kernels, which nothing may do while
a graph is captured. The second step captures. The least recently used graph gives way when there are too many, and has
to be wanted twice as often before it is captured again. When a capture fails, there are no more captures: steps without
a graph run as ever, and one warning names the reason.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.core.step import ForwardBatch
from weft.kernels import splits
from weft.models.base import LanguageModel, ModelSpec
from weft.worker.graphs_inputs import Bucket, StaticInputs, attention_batch

MAX_GRAPHS = 64
USES_BEFORE_CAPTURE = 2
MAX_ITEMS = 8192
"""Splits of a step: bounds the memory of their partial results. At 256 entries each, these are 2M tokens of context."""
MAX_ENTRIES = 1 << 19
"""(row, page) entries of a step."""
GRAPH_BYTES = 4 << 20
"""Of one graph, outside of torch's memory. An assumption, not measured."""
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
    batch_sizes: tuple[int, ...]
    """Rows that batches are padded to."""
    max_graphs: int = MAX_GRAPHS


class GraphCounts(NamedTuple):
    """What became of decode steps so far."""

    captured: int
    replayed: int
    without: int
    """Padded to a bucket that had no graph yet."""


class DecodeGraphs:
    """The decode passes of one worker. Used by one thread."""

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
        self._sizes = np.array(sorted(set(options.batch_sizes)), np.int64)
        self._max_graphs = options.max_graphs
        self._page_size = page_size
        rows = int(self._sizes[-1])
        self._max_entries = min(rows * -(-max_context // page_size), MAX_ENTRIES)
        largest = Bucket(rows, max(MAX_ITEMS, rows))
        self._inputs = StaticInputs(largest, self._max_entries, last_tokens.device)
        spec = model.spec
        self._logits = last_tokens.new_empty((rows, spec.vocab_size), dtype=_logits_dtype(spec))
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
        """The logits of every row [R, V], with its KV written; None, and nothing done, for a step that is not taken.

        The result is valid until the next call.
        """
        bucket = self._bucket(forward)
        if bucket is None or not (self._captures or bucket in self._graphs):
            return None
        self._inputs.send(bucket, forward)
        graph = self._graph(bucket)
        if graph is None:
            self._counts = self._counts._replace(without=self._counts.without + 1)
            self._pass(bucket)
        else:
            self._counts = self._counts._replace(replayed=self._counts.replayed + 1)
            graph.replay()
        return self._logits[: forward.num_rows]

    def _bucket(self, forward: ForwardBatch) -> Bucket | None:
        rows = forward.num_rows
        if not 0 < rows <= self._sizes[-1] or not is_plain_decode(forward):
            return None
        needed = splits.num_items(forward.kv_lens)
        padded = int(self._sizes[np.searchsorted(self._sizes, rows)])
        items = padded
        while items < needed + padded - rows:
            items *= 2
        if items > max(MAX_ITEMS, padded) or len(forward.kv_page_ids) > self._max_entries:
            return None
        return Bucket(padded, items)

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
            _log.warning("CUDA graphs: no more are captured, decoding is slower without (%s)", reason)
            return None
        self._graphs[bucket] = graph
        if len(self._graphs) > self._max_graphs:  # not before: a capture waits for those that still run
            given_up, _ = self._graphs.popitem(last=False)
            self._uses[given_up] = 0
            self._uses_needed[given_up] *= 2
        self._counts = self._counts._replace(captured=self._counts.captured + 1)
        return graph

    def _pass(self, bucket: Bucket) -> None:
        """One pass over what the static inputs hold, to the first rows of the logits."""
        model, views = self._model, self._inputs.views(bucket)
        batch = attention_batch(views, bucket, self._page_size)
        known = views["token_ids"]
        x = model.embed(torch.where(known >= 0, known, self._last_tokens.index_select(0, views["token_slots"])))
        for index, layer in enumerate(model.layers):
            x = layer.forward(x, model.provider.layer(index), batch, self._kv[index])
        # One tensor for all graphs: logits of its own for each would be most of their memory.
        self._logits[: bucket.rows].copy_(model.head(model.final_norm(x)))


def is_plain_decode(forward: ForwardBatch) -> bool:
    """Whether each row is one query token that sees all KV before it, and all that is asked of it are its logits."""
    every = np.arange(forward.num_rows)
    return (
        forward.num_tokens == forward.num_rows
        and bool((forward.q_indptr[:-1] == every).all())
        and np.array_equal(forward.output_tokens, every)
        and forward.embed_slots is None
        and (forward.causal is None or bool(forward.causal.all()))
        and (forward.visibility is None or bool((forward.visibility == EVERY_VISIBLE).all()))
        and (forward.mask_bits is None or len(forward.mask_bits) == 0)
        and len(forward.hidden_tokens) == 0
        and len(forward.store_tokens) == 0
    )


def _logits_dtype(spec: ModelSpec) -> torch.dtype:
    """See `models.base.LanguageModel.head`."""
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


def graph_bytes(spec: ModelSpec, most_rows: int) -> int:
    """About how much device memory graphs of up to `most_rows` rows take: logits twice, once as the head gives them,
    partial results of attention, and what the driver keeps of each graph."""
    logits = most_rows * spec.vocab_size * (2 * _logits_dtype(spec).itemsize + spec.dtype.itemsize)
    partials = MAX_ITEMS * spec.num_heads * (spec.head_dim + 2) * 4
    return logits + partials + MAX_GRAPHS * GRAPH_BYTES


def default_batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 to 64, every 16 to 256 and every 64 to 512, as far as `most` reaches, which is the last."""
    sizes = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, 513, 64))
    last = min(most, sizes[-1])
    return (*(size for size in sizes if size < last), last)
