"""Every operation in plain torch, one row at a time: the truth that faster kernels are tested against.

Owns correctness, not speed: each function follows its contract in `base.py` literally, computes in float32 (float64
for float64) and rounds once at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.base import Block, BlockShape, HeadNorm, HeadShape, Kernels, MovePages, Norm, NormedSum
from weft.kernels.batch import AttentionBatch
from weft.kernels.block_weights import BlockWeight, block_product, take_block_rows

NAME = "reference"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that intermediate results of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """Rearrange a weight [O, I] for this variant's `linear`, in plain torch. Contract: `base.PackWeight`."""
    return weight


def take_rows(weight: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows `indices` [T] of weight [O, I] as [T, I], in plain torch. Contract: `base.TakeRows`."""
    if isinstance(weight, BlockWeight):
        return take_block_rows(weight, indices).to(dtype or torch.float32)
    return weight.index_select(0, indices)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] to [T, O], in plain torch. Contract: `base.Linear`."""
    accumulate = wide(x.dtype)
    if isinstance(weight, BlockWeight):
        out = block_product(x, weight)
    else:
        out = x.to(accumulate) @ weight.to(accumulate).T
    if bias is not None:
        out = out + bias.to(accumulate)
    if residual is not None:
        out = out + residual.to(accumulate)
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in plain torch. Contract: `base.RmsNorm`."""
    widened = x.to(wide(x.dtype))
    normed = widened * torch.rsqrt(widened.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def linear_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None = None) -> NormedSum:
    """Linear with residual, and its RMS norm: two tensors [T, O], in plain torch. Contract: `base.LinearRmsNorm`."""
    total = linear(x, weight, bias, residual)
    return NormedSum(total, rms_norm(total, norm.weight, norm.eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [T, heads, D] by the angles of its token; cos and sin are [T, D / 2]."""
    cos, sin = cos.to(wide(x.dtype)).unsqueeze(1), sin.to(wide(x.dtype)).unsqueeze(1)
    left, right = x.to(wide(x.dtype)).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def rotate_and_store(
    qkv: Tensor,
    shape: HeadShape,
    rotation: tuple[Tensor, Tensor],
    norm: HeadNorm | None,
    batch: AttentionBatch,
    kv: Tensor,
) -> Tensor:
    """Rotate q and k of qkv, write k and v to their slots, in plain torch. Contract: `base.RotateAndStore`."""
    heads, kv_heads, _ = shape
    q, k, v = torch.split(qkv.view(qkv.shape[0], -1, shape.head_dim), [heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q = rms_norm(q, norm.q_weight, norm.eps)
        k = rms_norm(k, norm.k_weight, norm.eps)
    store(rotate(k, *rotation), v, batch, kv)
    return rotate(q, *rotation)


def store(k: Tensor, v: Tensor, batch: AttentionBatch, kv: Tensor) -> None:
    """Write k and v, each [T, num_kv_heads, D], into the slots of their tokens."""
    for token, slot in enumerate(batch.write_slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, batch.page_size)
            kv[page, 0, :, offset] = k[token]
            kv[page, 1, :, offset] = v[token]


def attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None = None) -> Tensor:
    """Paged attention: q [T, heads, D] to [T, heads * D], in plain torch. Contract: `base.Attention`."""
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for row in range(batch.num_rows):
        attend_row(row, q, kv, batch, scale, sliding_window, out)
    return out


def attend_row(
    row: int, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None, out: Tensor
) -> None:
    """Attention of one row, written into its part of out [T, num_heads * D]."""
    first, last = int(batch.q_indptr_host[row]), int(batch.q_indptr_host[row + 1])
    if first == last:
        return
    accumulate = wide(q.dtype)
    k, v = row_kv(row, kv, batch)
    seen = visible(row, batch, sliding_window)
    # Slots that no query sees may hold anything, NaN included, and 0 * NaN would leak into the sum.
    unseen = ~seen.any(0)
    v = v.to(accumulate).masked_fill(unseen[None, :, None], 0)
    queries = q[first:last].to(accumulate).transpose(0, 1).reshape(k.shape[0], -1, last - first, q.shape[2])
    scores = torch.einsum("hgqd,hkd->hgqk", queries, k.to(accumulate)) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    # A query that sees nothing has a row of -inf only, whose softmax is NaN: its output is zero by contract.
    weights = torch.softmax(scores, dim=-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    mixed = torch.einsum("hgqk,hkd->qhgd", weights, v)
    out[first:last] = mixed.reshape(last - first, -1).to(q.dtype)


def row_kv(row: int, kv: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """The K and V of a row's entries, each [num_kv_heads, kv_len, D]."""
    pages = batch.kv_page_ids[int(batch.kv_indptr_host[row]) : int(batch.kv_indptr_host[row + 1])]
    length = int(batch.kv_lens_host[row])
    gathered = kv.index_select(0, pages).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return gathered[0, :, :length], gathered[1, :, :length]


def visible(row: int, batch: AttentionBatch, sliding_window: int | None) -> Tensor:
    """Which of a row's KV entries each of its queries sees: bool [q, kv_len]."""
    device = batch.positions.device
    num_queries, length = int(batch.q_lens[row]), int(batch.kv_lens_host[row])
    first = int(batch.q_indptr_host[row])
    entries = torch.arange(length, device=device)
    seen = torch.ones(num_queries, length, dtype=torch.bool, device=device)
    if batch.causal is None or bool(batch.causal[row]):
        last_seen = length - num_queries + torch.arange(num_queries, device=device)
        seen &= entries <= last_seen[:, None]
    if batch.visibility is not None:
        words = batch.visibility[int(batch.kv_indptr_host[row]) : int(batch.kv_indptr_host[row + 1])]
        bits = words[:, None] >> torch.arange(batch.page_size, device=device, dtype=torch.int32)
        seen &= (bits & 1).bool().flatten()[:length]
    if batch.mask_bits is not None and batch.mask_indptr is not None:
        begin, end = int(batch.mask_indptr[row]), int(batch.mask_indptr[row + 1])
        if end > begin:
            packed = batch.mask_bits[begin:end].view(num_queries, -1)
            unpacked = packed[:, :, None] >> torch.arange(8, device=device, dtype=torch.uint8)
            seen &= (unpacked & 1).bool().flatten(1)[:, :length]
    if sliding_window is not None:
        positions = batch.positions[first : first + num_queries]
        seen &= positions[:, None] - entries < sliding_window
    return seen


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] to silu(gate) * up [T, I], in plain torch. Contract: `base.SiluMul`."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, H] times weight [2 I, H], gated to [T, I], in plain torch. Contract: `base.GatedLinear`."""
    return silu_mul(linear(x, weight, bias))


def no_block(shape: BlockShape, weights: Mapping[str, Tensor]) -> Block | None:
    """None: plain torch has no decoder layer as one operation. Contract: `base.PrepareBlock`."""
    return None


def copy_pages(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy whole pages within the KV of a layer, in plain torch. Contract: `base.CopyPages`."""
    kv[destination] = kv[source]


def copy_slots(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy the KV of single tokens, in plain torch. Contract: `base.CopySlots`."""
    page_size = kv.shape[3]
    values = kv[source // page_size, :, :, source % page_size]
    kv[destination // page_size, :, :, destination % page_size] = values


def prepare_move(source: Sequence[Tensor], destination: Sequence[Tensor]) -> MovePages:
    """Movements of pages between pools, in plain torch. Contract: `base.PrepareMove`."""

    def move(source_pages: Tensor, destination_pages: Tensor) -> None:
        for origin, target in zip(source, destination, strict=True):
            target[destination_pages] = origin[source_pages]

    return move


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
    prepare_block=no_block,
    copy_pages=copy_pages,
    copy_slots=copy_slots,
    prepare_move=prepare_move,
)
