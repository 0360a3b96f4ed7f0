"""A whole layer as one call of the library: `kernels.base.Block`.

Owns the layer's addresses and what all layers of a pass share: the batch, the rotation and the buffers between
operations. What happens in the call is in `src/block.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.kernels.base import BlockShape, Rotation
from weft.kernels.batch import AttentionBatch
from weft.kernels.block_weights import PANEL as BLOCK_PANEL
from weft.kernels.block_weights import BlockWeight, fields_of
from weft.kernels.cpu.library import BlockFields, Level, PassFields, Product, QuantPart
from weft.kernels.cpu.tensors import (
    DTYPES,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_STACKED,
    PANEL,
    batch_fields,
    fits,
    is_weight,
    thin_rows,
)

_PRODUCTS = ("qkv", "output", "gate_up", "down")
_NORMS = ("attention_norm", "mlp_norm")
_HEAD_NORMS = ("q_norm", "k_norm")


class _Matrix(NamedTuple):
    """The weight of a product as the library knows it."""

    fields: Product
    outputs: int
    inputs: int
    most_rows: float


def _block_matrix(
    dtype: torch.dtype, weight: BlockWeight, bias: Tensor | None, name: str, vnni: bool
) -> _Matrix | None:
    """The same for a weight in quantized blocks. A gated product of one call takes one part of whole pairs of
    panels."""
    if not weight.packed or not (bias is None or (fits(bias) and bias.dtype == dtype)):
        return None
    one_call = name != "gate_up" or gates_in_one_call(weight)
    parts = parts_of(weight)
    fields = Product(
        *(None, None if bias is None else bias.data_ptr(), weight.outputs, one_call),
        *(parts, len(parts), vnni),
    )
    return _Matrix(fields, weight.outputs, weight.inputs, float("inf"))


def gates_in_one_call(weight: BlockWeight) -> bool:
    """Whether the library's product with the weight may be gated."""
    return len(weight.parts) == 1 and weight.outputs % (2 * BLOCK_PANEL) == 0


def parts_of(weight: BlockWeight) -> ctypes.Array[QuantPart]:
    """A packed weight as the library knows it. Valid as long as the weight."""
    fields = [QuantPart(*part) for part in fields_of(weight)]
    return (QuantPart * len(fields))(*fields)


class _Pass(NamedTuple):
    """What the library is told of a pass, and what keeps it alive."""

    fields: Any
    """A pointer to `PassFields`."""
    keeps: tuple[Any, ...]


class CpuBlock:
    """A layer whose weights the library can read."""

    @classmethod
    def prepare(
        cls,
        call: Callable[..., None],
        level: Level,
        shape: BlockShape,
        weights: Mapping[str, Tensor],
        *,
        vnni: bool = False,
    ) -> CpuBlock | None:
        """`call` is `weft_block`; `vnni` as of `CpuKernels`.

        None: the library cannot compute this layer.
        """
        heads = shape.heads
        dtype = weights["attention_norm"].dtype
        vectors = [weights[name] for name in (*_NORMS, *_HEAD_NORMS) if name in weights]
        sized = 0 < heads.head_dim <= MAX_HEAD_DIM and heads.head_dim % 16 == 0 and heads.group <= MAX_GROUP
        if not fits(*vectors) or not sized:
            return None
        matrices = [_matrix(level, dtype, weights, name, vnni) for name in _PRODUCTS]
        known = [matrix for matrix in matrices if matrix is not None]
        if len(known) < len(matrices) or not _fit_together(shape, weights, known):
            return None
        return cls(call, level, shape, weights, known)

    def __init__(
        self,
        call: Callable[..., None],
        level: Level,
        shape: BlockShape,
        weights: Mapping[str, Tensor],
        matrices: list[_Matrix],
    ):
        """See `prepare`. `matrices` are those of `_PRODUCTS`."""
        norms = [weights.get(name) for name in ("attention_norm", *_HEAD_NORMS, "mlp_norm")]
        window = -1 if shape.sliding_window is None else shape.sliding_window
        self._weights = weights  # whose memory the fields point to
        self._fields = ctypes.pointer(
            BlockFields(
                *(*shape.heads, matrices[0].inputs, window, shape.eps, shape.scale),
                *(None if norm is None else norm.data_ptr() for norm in norms),
                *(matrix.fields for matrix in matrices),
            )
        )
        self._call = call
        self._level = int(level)
        self._dtype = weights["attention_norm"].dtype
        self._most_rows = min(matrix.most_rows for matrix in matrices)
        # As `attention` has it: in a window, which chunks a query sees in whole depends on its position.
        group = shape.heads.group
        self._max_queries = MAX_STACKED // group if shape.sliding_window is None else 0
        self._widths = (matrices[0].inputs, matrices[0].outputs, shape.heads.num_heads * shape.heads.head_dim)
        self._gate_up = 0 if matrices[2].fields.packed else matrices[2].outputs
        self._gated = matrices[2].outputs // 2
        self._dtype_number = DTYPES[self._dtype]
        # One string is found faster than a tuple of numbers, and a pass looks it up for every layer.
        self._shared_by = f"{__name__} {self._max_queries} {self._widths} {self._gate_up} {self._gated}"

    def __call__(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, kv: Tensor) -> Tensor | None:
        """See `base.Block`."""
        dtype = self._dtype
        rows, width = x.shape
        if not 0 < rows <= self._most_rows or width != self._widths[0] or x.dtype != dtype or kv.dtype != dtype:
            return None
        if not (x.is_contiguous() and kv.is_contiguous()):
            return None
        shared: _Pass | None = batch.cache.get(self._shared_by)
        if shared is None:
            shared = batch.cache[self._shared_by] = self._begin(x, rotation, batch)
        self._call(self._level, self._dtype_number, self._fields, shared.fields, x.data_ptr(), kv.data_ptr())
        return x

    def _begin(self, x: Tensor, rotation: Rotation, batch: AttentionBatch) -> _Pass:
        """What the layers of this pass share."""
        rows = x.shape[0]
        cos, sin = (angles.to(torch.float32).contiguous() for angles in rotation(batch))
        buffers = [x.new_empty(rows, width) for width in (*self._widths, self._gate_up, self._gated)]
        addresses = [None if not buffer.numel() else buffer.data_ptr() for buffer in buffers]
        plain, shared = batch_fields(batch), batch_fields(batch, self._max_queries)
        fields = PassFields(
            *(ctypes.pointer(plain), ctypes.pointer(shared), cos.data_ptr(), sin.data_ptr()),
            *(*addresses, torch.get_num_threads()),
        )
        return _Pass(ctypes.pointer(fields), (fields, plain, shared, cos, sin, buffers))


def _fit_together(shape: BlockShape, weights: Mapping[str, Tensor], matrices: list[_Matrix]) -> bool:
    """Whether each product takes what comes before it: the call itself trusts these sizes."""
    heads, queries = shape.heads, shape.heads.num_heads * shape.heads.head_dim
    qkv, output, gate_up, down = ((matrix.inputs, matrix.outputs) for matrix in matrices)
    hidden, gated = qkv[0], down[0]
    lengths = dict.fromkeys(_NORMS, hidden) | dict.fromkeys(_HEAD_NORMS, heads.head_dim)
    return (
        qkv[1] == queries + 2 * heads.num_kv_heads * heads.head_dim
        and output == (queries, hidden)
        and gate_up == (hidden, 2 * gated)
        and down[1] == hidden
        and all(weights[name].shape == (length,) for name, length in lengths.items() if name in weights)
    )


def _matrix(level: Level, dtype: torch.dtype, weights: Mapping[str, Tensor], name: str, vnni: bool) -> _Matrix | None:
    """A weight and its bias. None: the library has no product for it."""
    weight, bias = weights[name], weights.get(f"{name}_bias")
    if isinstance(weight, BlockWeight):
        return _block_matrix(dtype, weight, bias, name, vnni)
    packed = weight.dim() != 2
    outputs, inputs = (size * PANEL for size in weight.shape[:2]) if packed else weight.shape
    if packed and name == "gate_up" and weight.shape[0] % 2:
        return None
    if not is_weight(weight, dtype) or not (bias is None or (fits(bias) and bias.dtype == dtype)):
        return None
    most_rows = float("inf") if packed else thin_rows(level, dtype)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in (weight, bias))
    return (
        _Matrix(Product(*addresses, outputs, packed, None, 0, False), outputs, inputs, most_rows) if most_rows else None
    )
