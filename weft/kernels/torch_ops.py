"""The portable fast path: library kernels of torch, few temporaries, and indices that are made once per pass.

Owns nothing but functions. Attention is planned once per pass and head geometry (`torch_attention.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import reference
from weft.kernels.base import HeadNorm, HeadShape, Kernels
from weft.kernels.batch import AttentionBatch
from weft.kernels.torch_attention import attention

NAME = "torch"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """See `base.Linear`."""
    out = F.linear(x, weight, bias)
    return out if residual is None else residual.add_(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `base.RmsNorm`."""
    accumulate = reference.wide(x.dtype)
    # One pass for the sum of squares, without a widened copy of x.
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulate)
    scale = root.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale).to(x.dtype).mul_(weight)


def rotate_and_store(
    qkv: Tensor,
    shape: HeadShape,
    rotation: tuple[Tensor, Tensor],
    norm: HeadNorm | None,
    batch: AttentionBatch,
    kv: Tensor,
) -> Tensor:
    """See `base.RotateAndStore`."""
    heads, kv_heads, head_dim = shape
    qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if norm is not None:
        q = rms_norm(q, norm.q_weight, norm.eps)
        k = rms_norm(k, norm.k_weight, norm.eps)
    cos, sin = _rotation_rows(batch, rotation, qkv.dtype)
    store(_rotate(k, cos, sin), v, batch, kv)
    return _rotate(q, cos, sin)


def _rotation_rows(batch: AttentionBatch, rotation: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos twice and (-sin, sin), each [T, 1, D]: a rotation is then `x * cos + swap(x) * sin`."""
    key = ("torch.rotation", id(rotation[0]), dtype)
    found: tuple[Tensor, Tensor] | None = batch.cache.get(key)
    if found is None:
        cos, sin = rotation
        found = (
            torch.cat((cos, cos), dim=-1).to(reference.wide(dtype)).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(reference.wide(dtype)).unsqueeze(1),
        )
        batch.cache[key] = found
    return found


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out.to(x.dtype)


def store(k: Tensor, v: Tensor, batch: AttentionBatch, kv: Tensor) -> None:
    """Write k and v, each [T, num_kv_heads, D], into the slots of their tokens."""
    tokens, pages, offsets = _write_index(batch)
    if tokens is not None:
        k, v = k[tokens], v[tokens]
    kv[pages, 0, :, offsets] = k
    kv[pages, 1, :, offsets] = v


def _write_index(batch: AttentionBatch) -> tuple[Tensor | None, Tensor, Tensor]:
    """The tokens that are written (None: all), and their pages and offsets."""
    key = "torch.write_index"
    found: tuple[Tensor | None, Tensor, Tensor] | None = batch.cache.get(key)
    if found is None:
        slots, tokens = batch.write_slots, None
        if not batch.all_written:
            tokens = (slots >= 0).nonzero().squeeze(1)
            slots = slots[tokens]
        found = (tokens, slots // batch.page_size, slots % batch.page_size)
        batch.cache[key] = found
    return found


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `base.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


KERNELS = Kernels(linear, rms_norm, rotate_and_store, attention, silu_mul, reference.copy_pages, reference.copy_slots)
