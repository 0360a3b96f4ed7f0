"""The operations of `kernels.base` on the C++ library.

Owns what a tensor must be for a kernel to take it. Whatever does not fit (another dtype, device or layout) goes to the
torch variant, so every operation here takes everything that its contract allows.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from weft.kernels import reference, shared_chunks, torch_attention, torch_ops
from weft.kernels.base import HeadNorm, HeadShape, Kernels, Norm, NormedSum
from weft.kernels.batch import AttentionBatch
from weft.kernels.cpu import huge_pages, library
from weft.kernels.cpu.library import BatchFields, Level, Unavailable
from weft.kernels.shared_chunks import SharedChunks

NAME = "cpp"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
MAX_GROUP = 64
CHUNK, MAX_STACKED = 256, 16
"""`kChunk` and `kMaxStacked` of decode.h."""
PANEL = 32
"""Outputs, and inputs, that a packed weight takes at a time."""
PACKED = {torch.bfloat16: 1, torch.int8: 2}
"""Dtypes of weights that can be packed, and their numbers in the library."""
THIN_ROWS = {
    (Level.AMX, torch.bfloat16): 128,
    (Level.AVX512, torch.bfloat16): 16,
    (Level.AVX2, torch.bfloat16): 16,
    (Level.AMX, torch.float32): 16,
    (Level.AVX512, torch.float32): 16,
    (Level.AVX2, torch.float32): 8,
}
"""Products of up to so many rows with a weight that is not packed are ours: they read the weight once, where a
library's product rearranges it first. Measured against torch's product held to the same instructions; what is not
listed leaves it to torch. With a packed weight every product is ours."""
THIN_ROWS_INT8 = {Level.AMX: 16, Level.AVX512: 16, Level.AVX2: 32}
"""The same for an int8 weight that is not packed. Torch's product has it widened first. Not measured with AMX, whose
kernel is that of AVX-512."""


class CpuKernels:
    """The operations at one level of the library."""

    def __init__(self, loaded: ctypes.CDLL, level: Level):
        self.level = level
        self._level = int(level)
        self._rms_norm = loaded.weft_rms_norm
        self._silu_mul = loaded.weft_silu_mul
        self._rotate_and_store = loaded.weft_rotate_and_store
        self._linear = loaded.weft_linear
        self._linear_packed = loaded.weft_linear_packed
        self._pack_weight = loaded.weft_pack_weight
        self._packs = {dtype for dtype, number in PACKED.items() if loaded.weft_packs(self._level, number)}
        self._attention = loaded.weft_attention
        self._probe_read = loaded.weft_probe_read
        self._probe_product = loaded.weft_probe_product

    def pack_weight(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `base.PackWeight`: bfloat16 [O, I] -> [O / 32, I / 32, 2, 16, 32], which `packed.h` describes, and int8
        -> uint8 [O / 32, I / 32, 16, 64], which `int8.h` does."""
        if weight.dtype not in self._packs or (dtype or weight.dtype) != torch.bfloat16 or not weight.is_cpu:
            return weight
        outputs, inputs = weight.shape
        if outputs % PANEL or inputs % PANEL or not weight.is_contiguous():
            return weight
        step = (16, 2 * PANEL) if weight.dtype == torch.int8 else (2, 16, PANEL)
        dtype = torch.uint8 if weight.dtype == torch.int8 else weight.dtype
        packed = torch.empty(outputs // PANEL, inputs // PANEL, *step, dtype=dtype)
        huge_pages.ask(packed)
        self._pack_weight(
            *(self._level, PACKED[weight.dtype], weight.data_ptr(), packed.data_ptr()),
            *(outputs, inputs, torch.get_num_threads()),
        )
        return packed

    def packs_int8_for(self, dtype: torch.dtype) -> bool:
        """Whether products of `dtype` with int8 weights have them packed."""
        return dtype == torch.bfloat16 and torch.int8 in self._packs

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """See `base.Linear`."""
        rows = x.shape[0]
        if weight.dim() != 2:
            return self._packed_product(x, weight, bias, residual, scales)
        thin_rows = THIN_ROWS.get((self.level, x.dtype), 0) if scales is None else THIN_ROWS_INT8.get(self.level, 0)
        outputs, inputs = weight.shape
        fit = _fit(x, bias, residual) and _is_weight(weight, scales, x.dtype, outputs)
        if not 0 < rows <= thin_rows or not fit:
            return torch_ops.linear(x, weight, bias, residual, scales)
        out = residual if residual is not None else x.new_empty(rows, outputs)
        self._linear(
            *(self._level, DTYPES[x.dtype], x.data_ptr(), weight.data_ptr()),
            *(None if t is None else t.data_ptr() for t in (bias, scales, residual)),
            *(out.data_ptr(), rows, inputs, outputs, torch.get_num_threads()),
        )
        return out

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> Tensor:
        """See `base.GatedLinear`."""
        if weight.dim() != 2 and weight.shape[0] % 2 == 0:
            return self._packed_product(x, weight, bias, None, scales, gated=True)
        return self.silu_mul(self.linear(x, weight, bias, scales=scales))

    def linear_rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm: Norm,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> NormedSum:
        """See `base.LinearRmsNorm`. The product adds the residual as it writes; its rows are still in the cache."""
        total = self.linear(x, weight, bias, residual, scales)
        return NormedSum(total, self.rms_norm(total, norm.weight, norm.eps))

    def _packed_product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scales: Tensor | None,
        *,
        gated: bool = False,
    ) -> Tensor:
        rows, outputs, inputs = x.shape[0], weight.shape[0] * PANEL, weight.shape[1] * PANEL
        x = x.contiguous()
        if x.dtype != torch.bfloat16 or not _fit(x, bias, residual) or x.shape[1] != inputs:
            raise ValueError(f"a product of {x.dtype} {list(x.shape)} with a packed weight of {inputs} inputs")
        if not _is_weight(weight, scales, x.dtype, outputs):
            scaled = "no scales" if scales is None else f"{scales.dtype} scales {list(scales.shape)}"
            raise ValueError(f"a packed weight of {weight.dtype} and {outputs} outputs with {scaled}")
        out = residual if residual is not None else x.new_empty(rows, outputs // 2 if gated else outputs)
        if rows:
            self._linear_packed(
                *(self._level, x.data_ptr(), weight.data_ptr()),
                *(None if t is None else t.data_ptr() for t in (bias, scales, residual)),
                *(out.data_ptr(), rows, inputs, outputs, gated, torch.get_num_threads()),
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `base.RmsNorm`."""
        if not _fit(x, weight):
            return torch_ops.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._rms_norm(
            *(self._level, DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(x.numel() // size if size else 0, size, eps, torch.get_num_threads()),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `base.SiluMul`."""
        if not _fit(gate_up):
            return torch_ops.silu_mul(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_mul(
            *(self._level, DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr()),
            *(rows, size, torch.get_num_threads()),
        )
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: tuple[Tensor, Tensor],
        norm: HeadNorm | None,
        batch: AttentionBatch,
        kv: Tensor,
    ) -> Tensor:
        """See `base.RotateAndStore`."""
        weights = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
        angles_fit = all(t.dtype == torch.float32 and t.is_contiguous() for t in rotation)
        if not _fit(qkv, kv, *weights) or not angles_fit or shape.head_dim > MAX_HEAD_DIM:
            return torch_ops.rotate_and_store(qkv, shape, rotation, norm, batch, kv)
        q_weight, k_weight = (None if w is None else w.data_ptr() for w in weights)
        self._rotate_and_store(
            *(self._level, DTYPES[qkv.dtype], _fields(batch), *shape, qkv.data_ptr()),
            *(rotation[0].data_ptr(), rotation[1].data_ptr(), q_weight, k_weight, 0.0 if norm is None else norm.eps),
            *(kv.data_ptr(), torch.get_num_threads()),
        )
        heads, head_dim = shape.num_heads, shape.head_dim
        return qkv.as_strided((qkv.shape[0], heads, head_dim), (qkv.shape[1], head_dim, 1))

    def attention(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None = None
    ) -> Tensor:
        """See `base.Attention`."""
        tokens, heads, head_dim = q.shape
        sized = head_dim % 16 == 0 and 0 < head_dim <= MAX_HEAD_DIM and heads <= MAX_GROUP * kv.shape[2]
        if not _fit(kv) or q.dtype != kv.dtype or not sized:
            return torch_attention.attention(q, kv, batch, scale, sliding_window)
        stride, head_stride, one = q.stride()
        if head_stride != head_dim or one != 1:
            q, stride = q.contiguous(), heads * head_dim
        out = q.new_empty(tokens, heads * head_dim)
        # In a window, which chunks a query sees in whole depends on its position: nothing is shared.
        fields = _fields(batch, MAX_STACKED * kv.shape[2] // heads if sliding_window is None else 0)
        self._attention(
            *(self._level, DTYPES[q.dtype], fields, heads, kv.shape[2], head_dim, q.data_ptr(), stride),
            *(kv.data_ptr(), out.data_ptr(), scale, -1 if sliding_window is None else sliding_window),
            torch.get_num_threads(),
        )
        return out

    def probe_read(self, data: Tensor, threads: int) -> None:
        """Read all of a contiguous tensor."""
        self._probe_read(self._level, data.data_ptr(), data.numel() * data.element_size(), threads)

    def probe_product(self, data: Tensor, rounds: int, threads: int) -> float:
        """Multiply and add on `data`, 32 KiB for each thread, and return how many operations that was."""
        return float(self._probe_product(self._level, DTYPES[data.dtype], data.data_ptr(), rounds, threads))

    def gather(self) -> Kernels:
        """All operations; copies are torch's, which are as fast as memory."""
        return Kernels(
            pack_weight=self.pack_weight,
            linear=self.linear,
            gated_linear=self.gated_linear,
            linear_rms_norm=self.linear_rms_norm,
            rms_norm=self.rms_norm,
            rotate_and_store=self.rotate_and_store,
            attention=self.attention,
            silu_mul=self.silu_mul,
            copy_pages=reference.copy_pages,
            copy_slots=reference.copy_slots,
        )


@cache
def best() -> CpuKernels | Unavailable:
    """The operations at the level that this process uses, or why there are none."""
    try:
        loaded = library.load()
        return CpuKernels(loaded, library.wanted_level(loaded))
    except Unavailable as reason:
        return reason


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library has kernels for tensors of `dtype` on `device`."""
    return device.type == "cpu" and dtype in DTYPES


def _fit(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can read these: on the CPU, contiguous, one dtype that they know."""
    dtype = first.dtype
    if dtype not in DTYPES or not first.is_cpu or not first.is_contiguous():
        return False
    return all(t is None or (t.dtype == dtype and t.is_contiguous()) for t in others)


def _is_weight(weight: Tensor, scales: Tensor | None, dtype: torch.dtype, outputs: int) -> bool:
    """Whether this is a weight of `dtype`, or a quantized one with its scales."""
    if scales is None:
        return weight.dtype == dtype and weight.is_contiguous()
    known = scales.dtype == torch.float32 and scales.is_cpu and scales.is_contiguous() and scales.shape == (outputs,)
    return known and weight.dtype in (torch.int8, torch.uint8) and weight.is_contiguous()


def _fields(batch: AttentionBatch, max_queries: int = 0) -> BatchFields:
    """`batch` as the library reads it, made once per pass, with the chunks that rows of up to `max_queries` share.

    The tensors live as long as the batch.
    """
    key = (BatchFields, max_queries)
    found: BatchFields | None = batch.cache.get(key)
    if found is None:
        options = (batch.causal, batch.visibility, batch.mask_bits, batch.mask_indptr)
        chunks = shared_chunks.find(batch, CHUNK, max_queries)
        batch.cache[SharedChunks, max_queries] = chunks  # keeps its arrays
        found = batch.cache[key] = BatchFields(
            *(batch.num_rows, batch.num_tokens, batch.page_size),
            *(t.data_ptr() for t in (batch.q_indptr, batch.kv_indptr, batch.kv_page_ids, batch.kv_lens)),
            *(batch.positions.data_ptr(), batch.write_slots.data_ptr()),
            *(None if t is None else t.data_ptr() for t in options),
            *((0,) if chunks is None else (len(chunks.group_chunks), *(array.ctypes.data for array in chunks))),
        )
    return found
