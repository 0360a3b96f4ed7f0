"""The operations of `kernels.base` but attention in Triton, and all of them together.

Owns what a tensor must be for a kernel to take it. A tensor that does not fit goes to the torch variant, so every
operation here takes everything that its contract allows. Products of matrices are torch's, but for those with a weight
in quantized blocks.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from weft.kernels import reference, torch_ops
from weft.kernels.base import HeadNorm, HeadShape, Kernels, Norm, NormedSum
from weft.kernels.batch import AttentionBatch
from weft.kernels.block_weights import BlockWeight
from weft.kernels.triton import block_layout, blocks
from weft.kernels.triton.attention import attention
from weft.kernels.triton.block_layout import DeviceBlocks
from weft.kernels.triton.device import elementwise as device
from weft.kernels.triton.launch import takes
from weft.kernels.triton.move import prepare_move

MAX_ROW = 65536
"""The longest row that `rms_norm` takes: a program holds all of it."""
BLOCK = 1024
"""Numbers that a program of the other operations has at a time, about."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] to [T, O], in Triton. Contract: `base.Linear`."""
    if isinstance(weight, DeviceBlocks):
        return blocks.linear(x, weight, bias, residual)
    return torch_ops.linear(x, weight, bias, residual)


def pack_weight(weight: Tensor) -> Tensor:
    """Rearrange a weight in quantized blocks for `linear`; others stay as they are. Contract: `base.PackWeight`."""
    return block_layout.pack(weight) if isinstance(weight, BlockWeight) else weight


def take_rows(weight: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows `indices` [T] of weight [O, I] as [T, I], in torch. Contract: `base.TakeRows`."""
    if isinstance(weight, DeviceBlocks):
        return block_layout.take_rows(weight, indices).to(dtype or torch.float32)
    return reference.take_rows(weight, indices, dtype)


def linear_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None = None) -> NormedSum:
    """Linear with residual, and its RMS norm: two tensors [T, O], in Triton. Contract: `base.LinearRmsNorm`. The
    product is rounded before the residual is added, as in torch's `Linear`."""
    size = residual.shape[-1]
    if not takes(x, residual, norm.weight, bias) or size > MAX_ROW:
        total = linear(x, weight, bias, residual)
        return NormedSum(total, torch_ops.rms_norm(total, norm.weight, norm.eps))
    product = linear(x, weight, bias)
    out = torch.empty_like(residual)
    if out.numel():
        device.add_rms_norm[(len(out),)](
            *(product, residual, norm.weight, out, norm.eps), SIZE=size, **_row_blocks(size)
        )
    return NormedSum(residual, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in Triton. Contract: `base.RmsNorm`."""
    size = x.shape[-1]
    if not takes(x, weight) or size > MAX_ROW:
        return torch_ops.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    if x.numel():
        device.rms_norm[(x.numel() // size,)](x, weight, out, eps, SIZE=size, **_row_blocks(size))
    return out


def _row_blocks(size: int) -> dict[str, int]:
    """How a program holds a row of `size`."""
    block = int(triton.next_power_of_2(size))
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] to silu(gate) * up [T, I], in Triton. Contract: `base.SiluMul`."""
    if not takes(gate_up):
        return torch_ops.silu_mul(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        device.silu_mul[rows, triton.cdiv(size, block)](gate_up, out, SIZE=size, BLOCK=block)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, H] times weight [2 I, H], gated to [T, I], in Triton. Contract: `base.GatedLinear`."""
    return silu_mul(linear(x, weight, bias))


def rotate_and_store(
    qkv: Tensor,
    shape: HeadShape,
    rotation: tuple[Tensor, Tensor],
    norm: HeadNorm | None,
    batch: AttentionBatch,
    kv: Tensor,
) -> Tensor:
    """Rotate q and k of qkv, write k and v to their slots, in Triton. Contract: `base.RotateAndStore`."""
    weights = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
    angles_fit = all(t.dtype == torch.float32 and t.is_contiguous() for t in rotation)
    if not takes(qkv, kv, *weights) or not angles_fit or shape.head_dim % 2:
        return torch_ops.rotate_and_store(qkv, shape, rotation, norm, batch, kv)
    heads, kv_heads, head_dim = shape
    total, half = heads + 2 * kv_heads, max(1, triton.next_power_of_2(head_dim // 2))
    block = min(triton.next_power_of_2(total), max(1, BLOCK // (2 * half)))
    if len(qkv):
        device.rotate_and_store[len(qkv), triton.cdiv(total, block)](
            *(qkv, *rotation, *(rotation if norm is None else weights), batch.write_slots, kv),
            0.0 if norm is None else norm.eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAGE=batch.page_size,
            NORMED=norm is not None,
            BLOCK_H=block,
            BLOCK_HALF=half,
        )
    return qkv.view(-1, total, head_dim)[:, :heads]


def copy_pages(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy whole pages within the KV of a layer, in Triton. Contract: `base.CopyPages`."""
    if not takes(kv):
        return reference.copy_pages(kv, source, destination)
    size = kv.stride(0)
    if len(source):
        pages = (source.contiguous(), destination.contiguous())
        device.copy_pages[len(source), triton.cdiv(size, BLOCK)](kv, *pages, SIZE=size, BLOCK=BLOCK)
    return None


def copy_slots(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy the KV of single tokens, in Triton. Contract: `base.CopySlots`."""
    if not takes(kv):
        return reference.copy_slots(kv, source, destination)
    heads, page_size, head_dim = 2 * kv.shape[2], kv.shape[3], kv.shape[4]
    wide = triton.next_power_of_2(head_dim)
    block = min(triton.next_power_of_2(heads), max(1, BLOCK // wide))
    # A slot may be both a source and a destination, and programs run in no order: two launches keep them apart.
    staging = kv.new_empty(len(source), heads, head_dim)
    for slots, into_kv in ((source, False), (destination, True)) if len(source) else ():
        device.move_slots[len(source), triton.cdiv(heads, block)](
            *(kv, slots.contiguous(), staging),
            HEADS=heads,
            HEAD_DIM=head_dim,
            PAGE=page_size,
            INTO_KV=into_kv,
            BLOCK_H=block,
            BLOCK_D=wide,
        )
    return None


KERNELS = Kernels(
    pack_weight=pack_weight,
    take_rows=take_rows,
    linear=linear,
    gated_linear=gated_linear,
    linear_rms_norm=linear_rms_norm,
    rms_norm=rms_norm,
    rotate_and_store=rotate_and_store,
    attention=attention,
    silu_mul=silu_mul,
    prepare_block=reference.no_block,
    copy_pages=copy_pages,
    copy_slots=copy_slots,
    prepare_move=prepare_move,
)
