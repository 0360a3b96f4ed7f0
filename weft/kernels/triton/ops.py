"""The operations of `kernels.base` but attention in Triton, and all of them together.

Owns what a tensor must be for a kernel to take it. Whatever does not fit goes to the torch variant, so every operation
here takes everything that its contract allows. Products of matrices are torch's.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from weft.kernels import reference, torch_ops
from weft.kernels.base import HeadNorm, HeadShape, Kernels
from weft.kernels.batch import AttentionBatch
from weft.kernels.triton.attention import attention
from weft.kernels.triton.device import elementwise as device
from weft.kernels.triton.launch import takes

MAX_ROW = 65536
"""The longest row that `rms_norm` takes: a program holds all of it."""
BLOCK = 1024
"""Numbers that a program of the other operations has at a time, about."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `base.RmsNorm`."""
    size = x.shape[-1]
    if not takes(x, weight) or size > MAX_ROW:
        return torch_ops.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(size)
        warps = min(max(block // 512, 1), 16)
        device.rms_norm[(x.numel() // size,)](x, weight, out, eps, SIZE=size, BLOCK=block, num_warps=warps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `base.SiluMul`."""
    if not takes(gate_up):
        return torch_ops.silu_mul(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        device.silu_mul[rows, triton.cdiv(size, block)](gate_up, out, SIZE=size, BLOCK=block)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `base.GatedLinear`."""
    return silu_mul(torch_ops.linear(x, weight, bias))


def rotate_and_store(
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
    """See `base.CopyPages`."""
    if not takes(kv):
        return reference.copy_pages(kv, source, destination)
    size = kv.stride(0)
    if len(source):
        pages = (source.contiguous(), destination.contiguous())
        device.copy_pages[len(source), triton.cdiv(size, BLOCK)](kv, *pages, SIZE=size, BLOCK=BLOCK)
    return None


def copy_slots(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """See `base.CopySlots`."""
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
    pack_weight=reference.pack_weight,
    linear=torch_ops.linear,
    gated_linear=gated_linear,
    rms_norm=rms_norm,
    rotate_and_store=rotate_and_store,
    attention=attention,
    silu_mul=silu_mul,
    copy_pages=copy_pages,
    copy_slots=copy_slots,
)
