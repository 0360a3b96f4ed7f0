"""The operations of `kernels.base` on the C++ library.

A tensor that does not fit a kernel (another dtype, device or layout: `tensors` says what does) goes to the torch
variant, so every operation here takes everything that its contract allows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from weft.kernels import reference, torch_attention, torch_ops
from weft.kernels.base import BlockShape, HeadNorm, HeadShape, Kernels, MovePages, Norm, NormedSum
from weft.kernels.batch import AttentionBatch
from weft.kernels.block_weights import BLOCK_TYPES, BlockWeight, can_pack, fields_of, packed_size
from weft.kernels.cpu import huge_pages, library
from weft.kernels.cpu.block import CpuBlock, gates_in_one_call, parts_of
from weft.kernels.cpu.library import KernelsUnavailable, Level
from weft.kernels.cpu.move import CpuMove
from weft.kernels.cpu.sampling import CpuSampling
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

NAME = "cpp"


class CpuKernels:
    """The operations at one level of the library."""

    def __init__(self, loaded: ctypes.CDLL, level: Level, *, vnni: bool = False):
        """`vnni`: products with quantized blocks use dot products of bytes, which this machine must have."""
        self.level = level
        self.vnni = vnni
        self._level = int(level)
        self.sampling = CpuSampling(loaded, self._level)
        self._memory = huge_pages.Arena()
        self._rms_norm = loaded.weft_rms_norm
        self._silu_mul = loaded.weft_silu_mul
        self._rotate_and_store = loaded.weft_rotate_and_store
        self._linear = loaded.weft_linear
        self._linear_packed = loaded.weft_linear_packed
        self._pack_weight = loaded.weft_pack_weight
        self._take_rows = loaded.weft_take_rows
        self._packs = bool(loaded.weft_packs(self._level))
        self._pack_blocks = loaded.weft_pack_blocks
        self._take_block_rows = loaded.weft_take_block_rows
        self._linear_blocks = loaded.weft_linear_blocks
        self._attention = loaded.weft_attention
        self._move_pages = loaded.weft_move_pages
        self._block = loaded.weft_block
        self._probe_read = loaded.weft_probe_read
        self._probe_product = loaded.weft_probe_product

    @property
    def instructions(self) -> str:
        """The level, and whether products with quantized blocks use dot products of bytes."""
        return self.level.name.lower() + (library.WITH_VNNI if self.vnni else "")

    def pack_weight(self, weight: Tensor) -> Tensor:
        """Rearrange a weight [O, I] to [O / 32, I / 32, 32, 32] for this variant's `linear`, in C++.

        Contract: `base.PackWeight`. The order within 32 x 32 elements depends on the level and the dtype: see
        `panel_pairs.h` and `panel_floats.h`.
        """
        if isinstance(weight, BlockWeight):
            return self._packed_blocks(weight)
        if not self.packs(weight.dtype) or not weight.is_cpu:
            return weight
        outputs, inputs = weight.shape
        if outputs % PANEL or inputs % PANEL or not weight.is_contiguous():
            return weight
        packed = self._memory.empty(outputs // PANEL, inputs // PANEL, PANEL, PANEL, dtype=weight.dtype)
        self._pack_weight(
            *(self._level, DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr()),
            *(outputs, inputs, torch.get_num_threads()),
        )
        return packed

    def _packed_blocks(self, weight: BlockWeight) -> BlockWeight:
        """The weight, packed if all parts can be."""
        if weight.packed or not weight.is_cpu or not all(can_pack(part, weight.inputs) for part in weight.parts):
            return weight
        size = sum(packed_size(part, weight.inputs) for part in weight.parts)
        data = self._memory.empty(size, dtype=torch.uint8)
        packed = BlockWeight.of(data, weight.parts, weight.inputs, packed=True)
        for (source, outputs, kind), (target, *_) in zip(fields_of(weight), fields_of(packed), strict=True):
            self._pack_blocks(kind, source, target, outputs, weight.inputs, torch.get_num_threads())
        return packed

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether weights of `dtype` are packed."""
        return self._packs and dtype in DTYPES

    def take_rows(self, weight: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows `indices` [T] of a weight, in C++ where it is packed. Contract: `base.TakeRows`."""
        if isinstance(weight, BlockWeight) and weight.packed:
            return self._rows_of_blocks(weight, indices, dtype or torch.float32)
        if weight.dim() == 2 or isinstance(weight, BlockWeight):
            return reference.take_rows(weight, indices, dtype)
        rows, outputs, inputs = len(indices), weight.shape[0] * PANEL, weight.shape[1] * PANEL
        indices = indices.to(torch.int64).contiguous()
        out = torch.empty(rows, inputs, dtype=weight.dtype)
        taken = self._take_rows(
            *(DTYPES[weight.dtype], weight.data_ptr(), indices.data_ptr(), out.data_ptr(), rows, inputs, outputs)
        )
        if taken < rows:
            raise IndexError(f"row {int(indices[taken])} of a weight with {outputs}")
        return out

    def _rows_of_blocks(self, weight: BlockWeight, indices: Tensor, dtype: torch.dtype) -> Tensor:
        if len(weight.parts) > 1:
            raise ValueError("rows of a packed weight of several types of blocks cannot be taken")
        ((address, outputs, kind),) = fields_of(weight)
        indices = indices.to(torch.int64).contiguous()
        out = torch.empty(len(indices), weight.inputs)
        taken = self._take_block_rows(
            *(kind, address, indices.data_ptr(), out.data_ptr(), len(indices), weight.inputs, outputs)
        )
        if taken < len(indices):
            raise IndexError(f"row {int(indices[taken])} of a weight with {outputs}")
        return out.to(dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, I] times weight [O, I] to [T, O], in C++. Contract: `base.Linear`."""
        rows = x.shape[0]
        if isinstance(weight, BlockWeight):
            return self._block_product(x, weight, bias, residual)
        if weight.dim() != 2:
            return self._packed_product(x, weight, bias, residual)
        outputs, inputs = weight.shape
        known = fits(x, bias, residual) and is_weight(weight, x.dtype)
        if not 0 < rows <= thin_rows(self.level, x.dtype) or not known:
            return torch_ops.linear(x, weight, bias, residual)
        out = residual if residual is not None else x.new_empty(rows, outputs)
        self._linear(
            *(self._level, DTYPES[x.dtype], x.data_ptr(), weight.data_ptr()),
            *(None if t is None else t.data_ptr() for t in (bias, residual)),
            *(out.data_ptr(), rows, inputs, outputs, torch.get_num_threads()),
        )
        return out

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, H] times weight [2 I, H], gated to [T, I], in C++. Contract: `base.GatedLinear`."""
        if isinstance(weight, BlockWeight):
            if weight.packed and gates_in_one_call(weight):
                return self._block_product(x, weight, bias, None, gated=True)
        elif weight.dim() != 2 and weight.shape[0] % 2 == 0:
            return self._packed_product(x, weight, bias, None, gated=True)
        return self.silu_mul(self.linear(x, weight, bias))

    def linear_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None = None
    ) -> NormedSum:
        """Linear with residual, and its RMS norm: two tensors [T, O], in C++. Contract: `base.LinearRmsNorm`. The
        product adds the residual as it writes; its rows are still in the cache."""
        total = self.linear(x, weight, bias, residual)
        return NormedSum(total, self.rms_norm(total, norm.weight, norm.eps))

    def _block_product(
        self,
        x: Tensor,
        weight: BlockWeight,
        bias: Tensor | None,
        residual: Tensor | None,
        *,
        gated: bool = False,
    ) -> Tensor:
        if not weight.packed:
            return reference.linear(x, weight, bias, residual)
        rows, outputs = x.shape[0], weight.outputs
        x = x.contiguous()
        if not fits(x, bias, residual) or x.shape[1] != weight.inputs:
            raise ValueError(f"a product of {x.dtype} {list(x.shape)} with packed blocks of {weight.inputs} inputs")
        out = residual if residual is not None else x.new_empty(rows, outputs // 2 if gated else outputs)
        if rows:
            parts = parts_of(weight)
            self._linear_blocks(
                *(self._level, self.vnni, DTYPES[x.dtype], x.data_ptr(), parts, len(parts)),
                *(None if t is None else t.data_ptr() for t in (bias, residual)),
                *(out.data_ptr(), rows, weight.inputs, outputs, gated, torch.get_num_threads()),
            )
        return out

    def _packed_product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *,
        gated: bool = False,
    ) -> Tensor:
        rows, outputs, inputs = x.shape[0], weight.shape[0] * PANEL, weight.shape[1] * PANEL
        x = x.contiguous()
        if not fits(x, bias, residual) or not is_weight(weight, x.dtype) or x.shape[1] != inputs:
            raise ValueError(f"a product of {x.dtype} {list(x.shape)} with a packed weight of {inputs} inputs")
        out = residual if residual is not None else x.new_empty(rows, outputs // 2 if gated else outputs)
        if rows:
            self._linear_packed(
                *(self._level, DTYPES[x.dtype], x.data_ptr(), weight.data_ptr()),
                *(None if t is None else t.data_ptr() for t in (bias, residual)),
                *(out.data_ptr(), rows, inputs, outputs, gated, torch.get_num_threads()),
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, in C++. Contract: `base.RmsNorm`."""
        if not fits(x, weight):
            return torch_ops.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._rms_norm(
            *(self._level, DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(x.numel() // size if size else 0, size, eps, torch.get_num_threads()),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] to silu(gate) * up [T, I], in C++. Contract: `base.SiluMul`."""
        if not fits(gate_up):
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
        """Rotate q and k of qkv, write k and v to their slots, in C++. Contract: `base.RotateAndStore`."""
        weights = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
        angles_fit = all(t.dtype == torch.float32 and t.is_contiguous() for t in rotation)
        if not fits(qkv, kv, *weights) or not angles_fit or shape.head_dim > MAX_HEAD_DIM:
            return torch_ops.rotate_and_store(qkv, shape, rotation, norm, batch, kv)
        q_weight, k_weight = (None if w is None else w.data_ptr() for w in weights)
        self._rotate_and_store(
            *(self._level, DTYPES[qkv.dtype], batch_fields(batch), *shape, qkv.data_ptr()),
            *(rotation[0].data_ptr(), rotation[1].data_ptr(), q_weight, k_weight, 0.0 if norm is None else norm.eps),
            *(kv.data_ptr(), torch.get_num_threads()),
        )
        heads, head_dim = shape.num_heads, shape.head_dim
        return qkv.as_strided((qkv.shape[0], heads, head_dim), (qkv.shape[1], head_dim, 1))

    def attention(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None = None
    ) -> Tensor:
        """Paged attention: q [T, heads, D] to [T, heads * D], in C++. Contract: `base.Attention`."""
        tokens, heads, head_dim = q.shape
        sized = head_dim % 16 == 0 and 0 < head_dim <= MAX_HEAD_DIM and heads <= MAX_GROUP * kv.shape[2]
        if not fits(kv) or q.dtype != kv.dtype or not sized:
            return torch_attention.attention(q, kv, batch, scale, sliding_window)
        stride, head_stride, one = q.stride()
        if head_stride != head_dim or one != 1:
            q, stride = q.contiguous(), heads * head_dim
        out = q.new_empty(tokens, heads * head_dim)
        # In a window, which chunks a query sees in whole depends on its position: nothing is shared.
        fields = batch_fields(batch, MAX_STACKED * kv.shape[2] // heads if sliding_window is None else 0)
        self._attention(
            *(self._level, DTYPES[q.dtype], fields, heads, kv.shape[2], head_dim, q.data_ptr(), stride),
            *(kv.data_ptr(), out.data_ptr(), scale, -1 if sliding_window is None else sliding_window),
            torch.get_num_threads(),
        )
        return out

    def prepare_move(self, source: Sequence[Tensor], destination: Sequence[Tensor]) -> MovePages:
        """Movements of pages between pools, in C++. Contract: `base.PrepareMove`."""
        pools = (*source, *destination)
        if not all(t.is_cpu and t.dtype == torch.uint8 and t.stride(1) == 1 for t in pools):
            return reference.prepare_move(source, destination)
        return CpuMove(self._move_pages, source, destination)

    def prepare_block(self, shape: BlockShape, weights: Mapping[str, Tensor]) -> CpuBlock | None:
        """A decoder layer as one operation, in C++. Contract: `base.PrepareBlock`."""
        return CpuBlock.prepare(self._block, self.level, shape, weights, vnni=self.vnni)

    def probe_read(self, data: Tensor, threads: int) -> None:
        """Read all of a contiguous tensor."""
        self._probe_read(self._level, data.data_ptr(), data.numel() * data.element_size(), threads)

    def probe_product(self, data: Tensor, rounds: int, threads: int) -> float:
        """Multiply and add on `data`, 32 KiB for each thread, and return how many operations that was."""
        return float(self._probe_product(self._level, DTYPES[data.dtype], data.data_ptr(), rounds, threads))

    def gather(self) -> Kernels:
        """All operations; copies within the device are torch's."""
        return Kernels(
            pack_weight=self.pack_weight,
            take_rows=self.take_rows,
            linear=self.linear,
            gated_linear=self.gated_linear,
            linear_rms_norm=self.linear_rms_norm,
            rms_norm=self.rms_norm,
            rotate_and_store=self.rotate_and_store,
            attention=self.attention,
            silu_mul=self.silu_mul,
            prepare_block=self.prepare_block,
            copy_pages=reference.copy_pages,
            copy_slots=reference.copy_slots,
            prepare_move=self.prepare_move,
        )


@cache
def best() -> CpuKernels | KernelsUnavailable:
    """The operations at the level that this process uses, or why there are none."""
    try:
        loaded = library.load()
        level = library.wanted_level(loaded)
        return CpuKernels(loaded, level, vnni=library.wants_vnni(loaded, level))
    except KernelsUnavailable as reason:
        return reason


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library has kernels for tensors of `dtype` on `device`."""
    return device.type == "cpu" and dtype in DTYPES


def block_types(dtype: torch.dtype) -> frozenset[str]:
    """Types of quantized blocks that the library multiplies rows of `dtype` with."""
    return frozenset(BLOCK_TYPES) if dtype in DTYPES else frozenset()


def supports_bytes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library moves tensors on `device`: as bytes, so of every `dtype`."""
    return device.type == "cpu"
