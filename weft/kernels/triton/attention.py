"""Paged attention in Triton: which programs a pass needs, and their launches.

Owns the plan of a pass: which kernel has which of its work items (`weft.kernels.work_items`). Rows with masks or
visibility words (not *plain*) have launches of their own, instead of plain rows becoming general ones beside them: so a
row gets the same result in any company.

A plan is made from what the batch keeps on the host, once per pass and geometry, and goes to the device in one copy.
All layers follow it, sharing its scratch tensors: their launches are in order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from weft.core.step import I32
from weft.kernels import torch_attention
from weft.kernels.base import HeadShape
from weft.kernels.batch import AttentionBatch
from weft.kernels.triton.device import attention as device
from weft.kernels.triton.launch import INTERPRETED, takes
from weft.kernels.triton.support import MAX_GROUP, has_heads, is_hopper
from weft.kernels.work_items import CHUNK, Cuts, RowExtents, WorkTables, divide

DECODE_QUERIES = 4
"""Rows of up to so many queries are decoded, fewer where many heads share a KV head: the next token, and drafts."""
BLOCK_S = 16
"""Splits that `merge` reads at a time."""


class Tile(NamedTuple):
    """Block sizes of a kernel, as `device.attention` names them, and how it is compiled.

    Chosen by what the compiler says of devices of capability 8.0 to 9.0: shared memory stays within 99 KiB, the least
    that a block can have there, and registers hardly spill, but for float32 heads of 256 in large groups. Only
    `HOPPER_PREFILL` was chosen by measurement; on the same device other tiles of decoding rows differed by 1 %.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


HOPPER_PREFILL = Tile(block_m=128, block_n=128, block_d=128, num_warps=8, num_stages=3)
"""Plain rows of 16-bit heads of 65 to 128 on devices of capability 9.x. Wider blocks than elsewhere need 224 KiB of
shared memory and 255 registers, so a multiprocessor has one program; its two warp groups alternate between products and
the softmax. Three stages, because with two the compiler issues a copy only when the next step waits for it. The fastest
of nine on an H100: 1,102 microseconds for a prompt of 8,192 tokens, 1,145 with blocks of 64 entries, 1,302 with two
stages."""


class Launch(NamedTuple):
    """Programs of one kind, but for what a layer brings: queries, KV, window and scale."""

    kernel: Any
    grid: tuple[int, int]
    scratch: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    """What the batch brings, and the items: int32 [n, 8], as `device.attention` describes them."""
    sizes: dict[str, Any]


class TritonPlan(NamedTuple):
    """How a pass attends in layers of one geometry."""

    launches: list[Launch]
    merges: Tensor | None
    """int32 [n, 4], as `device.attention` describes them; None: no row has more than one split."""
    scratch: tuple[Tensor, ...]
    """Values [partials, heads, D], maxima and sums [partials, heads], float32."""


class Rules(NamedTuple):
    """What rows that are not plain obey, with nothing left out."""

    causal: Tensor
    visibility: Tensor
    mask_bits: Tensor
    mask_indptr: Tensor


def attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None = None) -> Tensor:
    """Paged attention: q [T, heads, D] to [T, heads * D], in Triton. Contract: `base.Attention`."""
    shape = HeadShape(q.shape[1], kv.shape[2], q.shape[2])
    if not has_heads(shape) or q.dtype != kv.dtype or not takes(kv):
        return torch_attention.attention(q, kv, batch, scale, sliding_window)
    if scale <= 0:  # the kernels find the maximum before they scale
        q, scale = -q, max(-scale, torch.finfo(torch.float32).tiny)
    if q.stride()[1:] != (shape.head_dim, 1):
        q = q.contiguous()
    plan = _plan_for(batch, shape, q.dtype)
    out = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
    window = -1 if sliding_window is None else sliding_window
    numbers = (q.stride(0), scale * math.log2(math.e))
    for kernel, grid, scratch, inputs, sizes in plan.launches:
        kernel[grid](q, kv, out, *scratch, *inputs, *numbers, WINDOW=window, **sizes)
    if plan.merges is not None:
        device.merge[len(plan.merges), shape.num_heads](
            *(out, *plan.scratch, plan.merges),
            HEADS=shape.num_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_S=BLOCK_S,
            BLOCK_D=triton.next_power_of_2(shape.head_dim),
            num_warps=2,
        )
    return out


def decode_queries(group: int) -> int:
    """The most queries of a row that is decoded."""
    return max(1, min(DECODE_QUERIES, MAX_GROUP // group))


def decode_tile(shape: HeadShape, dtype: torch.dtype) -> Tile:
    """All queries of a row that is decoded."""
    rows = max(16, triton.next_power_of_2(shape.group * decode_queries(shape.group)))
    warps = 8 if dtype == torch.float32 or rows >= 64 else 4
    return Tile(rows, _entries(shape, dtype), _padded(shape), warps, _stages(shape, dtype))


def prefill_tile(shape: HeadShape, dtype: torch.dtype, is_plain: bool, place: torch.device) -> Tile:
    """Queries of a row that is prefilled: as many as registers hold with their results."""
    if is_plain and dtype.itemsize == 2 and _padded(shape) == HOPPER_PREFILL.block_d and is_hopper(place):
        return HOPPER_PREFILL
    if dtype == torch.float32:
        rows = 32
    else:
        rows = 128 if is_plain and _padded(shape) <= 128 else 64
    rows = max(rows, triton.next_power_of_2(shape.group))
    return Tile(rows, _entries(shape, dtype), _padded(shape), 8, _stages(shape, dtype))


def _entries(shape: HeadShape, dtype: torch.dtype) -> int:
    """KV entries at a time: 16 KiB of K, and of V."""
    return max(16, min(64, 16384 // (_padded(shape) * dtype.itemsize)))


def _stages(shape: HeadShape, dtype: torch.dtype) -> int:
    """2: the next entries are on their way while these are attended to. Queries of 1 KiB leave no memory for it."""
    return 1 if _padded(shape) * dtype.itemsize >= 1024 else 2


def _padded(shape: HeadShape) -> int:
    return max(16, int(triton.next_power_of_2(shape.head_dim)))


def cuts(shape: HeadShape, dtype: torch.dtype, is_plain: bool, place: torch.device) -> Cuts:
    """How rows are divided on device `place`."""
    tile = prefill_tile(shape, dtype, is_plain, place)
    return Cuts(decode_queries(shape.group), tile.block_m // shape.group)


def _plan_for(batch: AttentionBatch, shape: HeadShape, dtype: torch.dtype) -> TritonPlan:
    key = ("triton.attention", shape, dtype)
    plan: TritonPlan | None = batch.cache.get(key)
    if plan is None:
        plan = (
            _plan(batch, shape, dtype) if batch.tables is None else _plan_of_tables(batch, batch.tables, shape, dtype)
        )
        batch.cache[key] = plan
    return plan


def _plan_of_tables(batch: AttentionBatch, tables: WorkTables, shape: HeadShape, dtype: torch.dtype) -> TritonPlan:
    """Launches that depend on the sizes of the tables alone. There are as many partial results as splits."""
    scratch = _scratch(batch, len(tables.splits) if len(tables.merges) else 0, shape)
    launches = [
        _launch(batch, shape, dtype, items, scratch, is_decode, True)
        for items, is_decode in ((tables.splits, True), (tables.tiles, False))
        if len(items)
    ]
    return TritonPlan(launches, tables.merges if len(tables.merges) else None, scratch)


def _plan(batch: AttentionBatch, shape: HeadShape, dtype: torch.dtype) -> TritonPlan:
    rows, place = RowExtents(batch.q_indptr_host, batch.kv_indptr_host, batch.kv_lens_host), batch.positions.device
    plain = divide(rows, cuts(shape, dtype, True, place), batch.plain_rows)
    others = divide(rows, cuts(shape, dtype, False, place), ~batch.plain_rows, plain.num_partials)
    kinds = [
        (items, is_decode, is_plain)
        for is_plain, found in ((True, plain), (False, others))
        for items, is_decode in ((found.splits, True), (found.tiles, False))
        if len(items)
    ]
    merges = np.concatenate((plain.merges, others.merges))
    *uploaded, merges_there = _upload([*(items for items, _, _ in kinds), merges], place)
    scratch = _scratch(batch, plain.num_partials + others.num_partials, shape)
    launches = [
        _launch(batch, shape, dtype, items, scratch, is_decode, is_plain)
        for items, (_, is_decode, is_plain) in zip(uploaded, kinds, strict=True)
    ]
    return TritonPlan(launches, merges_there if len(merges) else None, scratch)


def _scratch(batch: AttentionBatch, partials: int, shape: HeadShape) -> tuple[Tensor, ...]:
    heads = shape.num_heads
    sizes = ((partials, heads, shape.head_dim), (partials, heads), (partials, heads))
    return tuple(batch.positions.new_empty(size, dtype=torch.float32) for size in sizes)


def _launch(
    batch: AttentionBatch,
    shape: HeadShape,
    dtype: torch.dtype,
    items: Tensor,
    scratch: tuple[Tensor, ...],
    is_decode: bool,
    is_plain: bool,
) -> Launch:
    if is_decode:
        tile = decode_tile(shape, dtype)
    else:
        tile = prefill_tile(shape, dtype, is_plain, batch.positions.device)
    # Plain rows read no rules, so for them any tensors will do.
    rules = Rules(*(batch.kv_page_ids,) * 4) if is_plain else _rules(batch)
    sizes = {
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "PAGE": batch.page_size,
        "GENERAL": not is_plain,
        "WIDEN": INTERPRETED,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": tile.block_d,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return Launch(
        kernel=device.decode if is_decode else device.prefill,
        grid=(len(items), shape.num_kv_heads),
        scratch=scratch if is_decode else (),
        inputs=(batch.kv_page_ids, batch.positions, *rules, items),
        sizes=sizes | {"CHUNK": CHUNK} if is_decode else sizes,
    )


def _upload(arrays: list[I32], device: torch.device) -> list[Tensor]:
    """These arrays on `device`, in one copy, asynchronous on a GPU."""
    flat = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]))
    if device.type != "cpu":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = torch.split(flat, [a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def _rules(batch: AttentionBatch) -> Rules:
    """The rules of rows that are not plain, all of them: so there is one kernel for such rows, in any company."""
    found: Rules | None = batch.cache.get(Rules)
    if found is None:
        lens, pages = batch.kv_lens, batch.kv_page_ids
        bits, indptr = batch.mask_bits, batch.mask_indptr
        found = batch.cache[Rules] = Rules(
            causal=(lens.new_ones(len(lens), dtype=torch.bool) if batch.causal is None else batch.causal).view(
                torch.uint8
            ),
            visibility=lens.new_full(pages.shape, -1) if batch.visibility is None else batch.visibility,
            mask_bits=lens.new_zeros(1, dtype=torch.uint8) if bits is None else bits,
            mask_indptr=lens.new_zeros(len(lens) + 1) if indptr is None else indptr,
        )
    return found
