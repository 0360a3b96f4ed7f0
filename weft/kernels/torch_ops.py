"""The portable fast path: library kernels of torch, few temporaries, and indices that are made once per pass.

Owns nothing but functions. Attention has a file of its own, `torch_attention.py`. Where a choice between equal
formulas was made by measurement, a comment says what was measured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import reference
from weft.kernels.base import HeadNorm, HeadShape, Kernels, Norm, NormedSum
from weft.kernels.batch import AttentionBatch
from weft.kernels.block_weights import BlockWeight
from weft.kernels.torch_attention import attention

NAME = "torch"

ROTATED_TOKENS = 64
"""Tokens whose heads are normalised and rotated at a time: their float32 copy then stays in a core's cache."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] to [T, O], in torch. Contract: `base.Linear`."""
    if isinstance(weight, BlockWeight):
        return reference.linear(x, weight, bias, residual)
    if x.shape[0] == 1 and x.device.type == "cpu":
        # A matrix-vector product reads weights 1.3 times as fast as the matrix product that `F.linear` calls.
        out = torch.mv(weight, x[0])[None]
        if bias is not None:
            out += bias
    else:
        out = F.linear(x, weight, bias)
    return out if residual is None else residual.add_(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in torch. Contract: `base.RmsNorm`."""
    # A widened copy that is scaled in place beats both `F.rms_norm` and products of mixed dtypes.
    widened = x.to(reference.wide(x.dtype), copy=True)
    return _norm_in_place(widened, weight, eps).to(x.dtype)


def linear_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None = None) -> NormedSum:
    """Linear with residual, and its RMS norm: two tensors [T, O], in torch. Contract: `base.LinearRmsNorm`."""
    total = linear(x, weight, bias, residual)
    return NormedSum(total, rms_norm(total, norm.weight, norm.eps))


def _norm_in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x.mul_(scale).mul_(weight)


def rotate_and_store(
    qkv: Tensor,
    shape: HeadShape,
    rotation: tuple[Tensor, Tensor],
    norm: HeadNorm | None,
    batch: AttentionBatch,
    kv: Tensor,
) -> Tensor:
    """Rotate q and k of qkv, write k and v to their slots, in torch. Contract: `base.RotateAndStore`."""
    heads, kv_heads, head_dim = shape
    qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    cos, sin = _rotation_rows(batch, rotation, qkv.dtype)
    for begin in range(0, len(qkv), ROTATED_TOKENS):
        block = slice(begin, begin + ROTATED_TOKENS)
        turned = qkv[block, : heads + kv_heads]
        turned.copy_(_norm_and_rotate(turned, heads, norm, cos[block], sin[block]))
    tokens, slots = _write_index(batch, kv_heads)
    # Keys and values are neighbours in `qkv`, so one copy writes both.
    written = qkv[:, heads:] if tokens is None else qkv[tokens, heads:]
    kv.view(-1, head_dim).index_copy_(0, slots, written.reshape(-1, head_dim))
    return qkv[:, :heads]


def _norm_and_rotate(x: Tensor, heads: int, norm: HeadNorm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, query and key heads, D] -> the same, normalised and rotated, in the wide dtype; x is kept."""
    widened = x.to(cos.dtype, copy=norm is not None)
    if norm is not None:
        _norm_in_place(widened[:, :heads], norm.q_weight, norm.eps)
        _norm_in_place(widened[:, heads:], norm.k_weight, norm.eps)
    half = x.shape[-1] // 2
    turned = widened * cos
    turned[..., :half].addcmul_(widened[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(widened[..., :half], sin)
    return turned


def _rotation_rows(batch: AttentionBatch, rotation: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos [T, 1, D], repeated for both halves of a head, and sin [T, 1, D / 2], in the wide dtype."""
    # The key holds the tensors themselves: an id alone could be that of a freed one.
    key = ("torch.rotation", *rotation, dtype)
    found: tuple[Tensor, Tensor] | None = batch.cache.get(key)
    if found is None:
        cos, sin = (angles.to(reference.wide(dtype)).unsqueeze(1) for angles in rotation)
        found = batch.cache[key] = (torch.cat((cos, cos), dim=-1), sin)
    return found


def _write_index(batch: AttentionBatch, kv_heads: int) -> tuple[Tensor | None, Tensor]:
    """The tokens that are written (None: all), and where: rows of the KV seen as [N * 2 * heads * P, D]."""
    key = ("torch.write_index", kv_heads)
    found: tuple[Tensor | None, Tensor] | None = batch.cache.get(key)
    if found is None:
        slots, tokens = batch.write_slots, None
        if not batch.all_written:
            tokens = (slots >= 0).nonzero().squeeze(1)
            slots = slots[tokens]
        half_and_head = torch.arange(2 * kv_heads, device=slots.device)
        blocks = (slots // batch.page_size)[:, None] * (2 * kv_heads) + half_and_head
        rows = blocks * batch.page_size + (slots % batch.page_size)[:, None]
        found = batch.cache[key] = (tokens, rows.flatten())
    return found


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] to silu(gate) * up [T, I], in torch. Contract: `base.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, H] times weight [2 I, H], gated to [T, I], in torch. Contract: `base.GatedLinear`."""
    return silu_mul(linear(x, weight, bias))


KERNELS = Kernels(
    pack_weight=reference.pack_weight,
    take_rows=reference.take_rows,
    linear=linear,
    gated_linear=gated_linear,
    linear_rms_norm=linear_rms_norm,
    rms_norm=rms_norm,
    rotate_and_store=rotate_and_store,
    attention=attention,
    silu_mul=silu_mul,
    prepare_block=reference.no_block,
    copy_pages=reference.copy_pages,
    copy_slots=reference.copy_slots,
    prepare_move=reference.prepare_move,
)
