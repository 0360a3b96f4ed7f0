"""The seam between models and kernels: which operations there are, and their contracts.

Owns the signatures. An implementation is a plain function; `dispatch.py` gathers one of each into a `Kernels` that a
model receives when it is built. Every function is free of global state, allocates its result unless it says that it
works in place, and may be called under `torch.inference_mode`.

Shapes use: T query tokens, H hidden size, D head size, N pages, P page size. The KV of a layer is one tensor
[N, 2, num_kv_heads, P, D], contiguous: K at index 0, V at index 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.kernels.batch import AttentionBatch


class HeadShape(NamedTuple):
    """How the columns of a fused qkv matrix divide into heads: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head; query head h reads KV head h // group."""
        return self.num_heads // self.num_kv_heads


class HeadNorm(NamedTuple):
    """RMS normalisation of each query and key head before the rotation."""

    q_weight: Tensor
    """[D]"""
    k_weight: Tensor
    """[D]"""
    eps: float


class Norm(NamedTuple):
    """Weight and epsilon of an RMS normalisation."""

    weight: Tensor
    """[H]"""
    eps: float


class NormedSum(NamedTuple):
    """A sum, and the same normalised."""

    total: Tensor
    """[T, H]"""
    normed: Tensor
    """[T, H]"""


class PackWeight(Protocol):
    """The weight of a `Linear`, rearranged for it once, when it is loaded."""

    def __call__(self, weight: Tensor) -> Tensor:
        """weight [O, I] -> the same numbers in the order that the same implementation's `linear` reads best.

        The result is `weight` itself where it cannot do better; else a tensor of another number of dimensions, which
        only that implementation's `linear` and `take_rows` read. `weight` may also be a `BlockWeight`, and so is then
        the result.
        """
        ...


class TakeRows(Protocol):
    """Rows of a weight that may be packed: an embedding table that is also the head."""

    def __call__(self, weight: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """weight [O, I] or what `pack_weight` made of it, indices [T] int64 or int32, each below O -> [T, I], freshly
        allocated. The weight is of floats, or a `BlockWeight`: then the rows are of `dtype`, which else is the
        weight's."""
        ...


class Linear(Protocol):
    """`x @ weight.T (+ bias) (+ residual)`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, I], weight [O, I], bias [O] or None, residual [T, O] or None -> [T, O].

        `weight` may also be what `pack_weight` made of it, or a `BlockWeight`: rows of x meet it in 8 bits
        (`block_weights.quantize_rows`), or as they are where `dispatch.rounds_activations` says so. `residual` is
        consumed: the result may be written over it.
        """
        ...


class LinearRmsNorm(Protocol):
    """A `Linear` with a residual and the `RmsNorm` of what it gives: from one half of a block to the other."""

    def __call__(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None = None
    ) -> NormedSum:
        """x [T, I], residual [T, O], norm of O, the others as in `Linear`. `residual` is consumed.

        The total is rounded to x's dtype before it is normalised, as if `Linear` had returned it.
        """
        ...


class RmsNorm(Protocol):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H], weight [H] -> [..., H] in x's dtype; the mean is taken in float32, or float64 for float64."""
        ...


class RotateAndStore(Protocol):
    """From the fused projection to queries ready for attention, with keys and values in their pages."""

    def __call__(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: tuple[Tensor, Tensor],
        norm: HeadNorm | None,
        batch: AttentionBatch,
        kv: Tensor,
    ) -> Tensor:
        """qkv [T, (num_heads + 2 num_kv_heads) D] -> queries [T, num_heads, D]. `qkv` is consumed.

        `rotation` is (cos, sin), each [T, D / 2] float32: component j of a head turns with component j + D / 2
        (the split-half convention of the Llama family). Writes K and V at `batch.write_slots`; tokens with slot -1
        are not written. Writes nothing else of `kv`.
        """
        ...


class Attention(Protocol):
    """Paged attention over a ragged batch; the rules of visibility are those of `core.step.ForwardBatch`."""

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None = None
    ) -> Tensor:
        """q [T, num_heads, D], kv [N, 2, num_kv_heads, P, D] -> [T, num_heads * D].

        Slots that no query of a row may see have no influence on it, even if they hold NaN (pages are reused
        without being cleared). A query that sees nothing gets zeros.
        """
        ...


class SiluMul(Protocol):
    """The gated activation `silu(gate) * up`."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I], gate first -> [T, I]. `gate_up` is consumed."""
        ...


class GatedLinear(Protocol):
    """`SiluMul` of a `Linear`: the first two thirds of a gated feed-forward block (Shazeer, 2020)."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, H], weight [2 I, H] or what `pack_weight` made of it, gates first, bias [2 I] or None -> [T, I].

        The product is rounded to x's dtype before the activation, as if it had been a tensor.
        """
        ...


class BlockShape(NamedTuple):
    """What a layer of pre-norm attention and a gated feed-forward part is made of, beside its weights."""

    heads: HeadShape
    eps: float
    """Of every normalisation."""
    scale: float
    """Of attention's scores."""
    sliding_window: int | None
    """As in `Attention`."""


Rotation = Callable[[AttentionBatch], tuple[Tensor, Tensor]]
"""The (cos, sin) of a batch's positions, as `RotateAndStore` takes them."""


class Block(Protocol):
    """A whole layer with its weights."""

    def __call__(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, kv: Tensor) -> Tensor | None:
        """x [T, H] -> what the layer makes of it, [T, H], as if its operations had been called one by one; K and V are
        written as `RotateAndStore` says. `x` is consumed. `rotation` is called once for all layers of a pass.

        None, with nothing done: these arguments are not for it.
        """
        ...


class PrepareBlock(Protocol):
    """A layer as one operation, for backends whose calls cost something."""

    def __call__(self, shape: BlockShape, weights: Mapping[str, Tensor]) -> Block | None:
        """`weights` by their names in `models.layers`, those of products perhaps packed by the same backend.

        The result holds them. None: the layer is made of the other operations.
        """
        ...


class CopyPages(Protocol):
    """Whole pages within one layer's KV."""

    def __call__(self, kv: Tensor, source: Tensor, destination: Tensor) -> None:
        """`kv[destination[i]] = kv[source[i]]` for int64 page ids [n], in place; no destination is also a source."""
        ...


class CopySlots(Protocol):
    """Single tokens within one layer's KV."""

    def __call__(self, kv: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copy the K and V in slots `source` to slots `destination` (`page * P + offset`, int64 [n]), in place.

        All sources are read before any destination is written.
        """
        ...


class MovePages(Protocol):
    """Whole pages of all layers from one pool to another."""

    def __call__(self, source_pages: Tensor, destination_pages: Tensor) -> None:
        """Copy pages `source_pages` of the source to pages `destination_pages` of the destination, int64 ids [n].

        Every layer's part of every page is copied. No two destinations are the same page.
        """
        ...


class PrepareMove(Protocol):
    """Movements of pages from one pool to another, as bytes, for backends whose calls cost something."""

    def __call__(self, source: Sequence[Tensor], destination: Sequence[Tensor]) -> MovePages:
        """Pools are uint8 [pages, bytes of the layer's part of a page] for each layer, and share no memory.

        The parts of a page in `source` and `destination` are equally long; each is contiguous, and pages may be further
        apart. The result holds the pools.
        """
        ...


class Kernels(NamedTuple):
    """One implementation of every operation. Field names are the names that `dispatch` registers."""

    pack_weight: PackWeight
    take_rows: TakeRows
    linear: Linear
    gated_linear: GatedLinear
    linear_rms_norm: LinearRmsNorm
    rms_norm: RmsNorm
    rotate_and_store: RotateAndStore
    attention: Attention
    silu_mul: SiluMul
    prepare_block: PrepareBlock
    copy_pages: CopyPages
    copy_slots: CopySlots
    prepare_move: PrepareMove
