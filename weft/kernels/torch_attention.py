"""Paged attention with torch's fused attention: gather the pages of similar rows, then attend to them at once.

Owns the plan of a pass: which rows go together, where their pages are, and the mask. It is made once per pass, head
geometry and window, kept in the batch's cache, and followed by every layer.

Short rows (decoding) of equal query count are batched: all query heads of a KV head attend together, as if they were
more queries of it, so a row's KV is read once. Long rows (prefill) attend alone, and one that starts at its first
token needs no mask. Groups are kept to about `GATHER_BYTES`, so that what was gathered is in cache when it is read.
Rows that are not plain (masks, visibility words, not causal) go to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.step import Bool
from weft.kernels import reference
from weft.kernels.base import HeadShape
from weft.kernels.batch import AttentionBatch

I64 = npt.NDArray[np.int64]

GATHER_BYTES = 8 * 1024 * 1024
"""About what a core's caches hold; measured flat between 4 and 16 MiB."""


BATCHED_QUERIES = 16
"""Rows of up to so many queries are batched with others; a mask over group * Q queries is still small for them."""
MIN_FILL = 0.75
"""The shortest row of a group has at least this share of the longest one's entries."""


class RowGroup(NamedTuple):
    """Plain rows of equal query count that attend in one call.

    B rows, Q queries each, E entries per row: exact for a single row, else whole pages of the longest one.
    """

    tokens: slice | Tensor
    """The rows' query tokens, row by row: a slice where they are contiguous, else int64 [B * Q]."""
    num_rows: int
    num_queries: int
    num_entries: int
    blocks: Tensor
    """int32 [2 * B * heads * pages]: rows of the KV seen as [N * 2 * heads, P * D], K first."""
    hidden: Tensor | None
    """int64: entries, counted in [2 * B * heads * E], beyond the end of their row. They are zeroed: they may be NaN."""
    mask: Tensor | None
    """0 or -inf in the dtype of the queries: [B, 1, group * Q or 1, E] when batched, else [1, 1, Q, E]."""
    is_batched: bool
    is_causal: bool
    """A single row whose entries are exactly its own queries; needs no mask."""


class TorchPlan(NamedTuple):
    """How a pass attends in layers of one geometry."""

    groups: list[RowGroup]
    other_rows: list[int]
    """Rows for the reference."""
    workspace: Tensor
    """Holds the gathered KV of one group at a time, [elements]."""


def attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, sliding_window: int | None = None) -> Tensor:
    """Paged attention: q [T, heads, D] to [T, heads * D], in torch. Contract: `base.Attention`."""
    shape = HeadShape(q.shape[1], kv.shape[2], q.shape[2])
    plan = _plan_for(batch, shape, sliding_window, kv.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    by_head = out.view(-1, shape.num_kv_heads, shape.group, shape.head_dim)
    for group in plan.groups:
        by_head[group.tokens] = _attend(q[group.tokens], kv, group, shape, scale, plan.workspace)
    out = out.flatten(1)
    for row in plan.other_rows:
        reference.attend_row(row, q, kv, batch, scale, sliding_window, out)
    return out


def _attend(q: Tensor, kv: Tensor, group: RowGroup, shape: HeadShape, scale: float, workspace: Tensor) -> Tensor:
    """Attention of one group: q [B * Q, num_heads, D] -> [B * Q, num_kv_heads, group, D], in any memory order."""
    rows, queries, heads, head_dim = group.num_rows, group.num_queries, shape.num_kv_heads, shape.head_dim
    page_elements = kv.shape[3] * kv.shape[4]
    gathered = workspace[: len(group.blocks) * page_elements].view(-1, page_elements)
    torch.index_select(kv.view(-1, page_elements), 0, group.blocks, out=gathered)
    if group.hidden is not None:
        gathered.view(-1, head_dim).index_fill_(0, group.hidden, 0)
    k, v = gathered.view(2, rows, heads, -1, head_dim)[:, :, :, : group.num_entries]
    by_head = q.reshape(rows, queries, heads, shape.group, head_dim)
    if group.is_batched:
        stacked = by_head.permute(0, 2, 3, 1, 4).reshape(rows, heads, shape.group * queries, head_dim)
        mixed = F.scaled_dot_product_attention(stacked, k, v, attn_mask=group.mask, scale=scale)
        mixed = mixed.view(rows, heads, shape.group, queries, head_dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(-1, heads, shape.group, head_dim)
    # The group is the batch dimension, over which K and V are views of themselves.
    mixed = F.scaled_dot_product_attention(
        by_head[0].permute(2, 1, 0, 3),
        k.expand(shape.group, -1, -1, -1),
        v.expand(shape.group, -1, -1, -1),
        attn_mask=group.mask,
        is_causal=group.is_causal,
        scale=scale,
    )
    return mixed.permute(2, 1, 0, 3)


def _plan_for(batch: AttentionBatch, shape: HeadShape, window: int | None, dtype: torch.dtype) -> TorchPlan:
    key = ("torch.attention", shape, window, dtype)
    plan: TorchPlan | None = batch.cache.get(key)
    if plan is None:
        plan = batch.cache[key] = _plan(batch, shape, window, dtype)
    return plan


def _plan(batch: AttentionBatch, shape: HeadShape, window: int | None, dtype: torch.dtype) -> TorchPlan:
    lengths, queries = batch.kv_lens_host.astype(np.int64), batch.q_lens.astype(np.int64)
    # Fewer entries than queries leaves queries that see nothing: rare, and the reference knows what to do.
    plain = batch.plain_rows & (lengths >= queries)
    first_pages = np.zeros_like(lengths)
    if window is not None:
        first_pages, sees = _windowed(batch, window)
        plain = plain & sees
    entries = lengths - first_pages * batch.page_size
    row_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    groups = [
        _group(batch, shape, window, dtype, rows, first_pages[rows])
        for rows in _similar_rows(np.nonzero(plain & (queries > 0))[0], queries, entries, GATHER_BYTES // row_bytes)
    ]
    size = max((len(g.blocks) for g in groups), default=0) * batch.page_size * shape.head_dim
    others = np.nonzero(~plain & (queries > 0))[0].tolist()
    return TorchPlan(groups, others, torch.empty(size, dtype=dtype, device=batch.positions.device))


def _windowed(batch: AttentionBatch, window: int) -> tuple[I64, Bool]:
    """The first page of each row that its queries see through the window; whether each of them sees anything."""
    positions = batch.positions.cpu().numpy()
    row_of_token = np.repeat(np.arange(batch.num_rows), batch.q_lens)
    last_seen = (batch.kv_lens_host - batch.q_indptr_host[1:])[row_of_token] + np.arange(len(positions))
    first_seen = np.maximum(positions - window + 1, 0)
    first_pages = np.full(batch.num_rows, np.iinfo(np.int64).max)
    np.minimum.at(first_pages, row_of_token, first_seen // batch.page_size)
    sees = np.ones(batch.num_rows, np.bool_)
    np.logical_and.at(sees, row_of_token, first_seen <= last_seen)
    return np.where(batch.q_lens > 0, first_pages, 0), sees


def _similar_rows(rows: I64, queries: I64, entries: I64, max_entries: int) -> Iterator[I64]:
    """Divide `rows` into groups: equal query counts, similar entry counts, at most `max_entries` with padding."""
    order = rows[np.lexsort((rows, -entries[rows], queries[rows]))]
    begin = 0
    for i in range(1, len(order) + 1):
        if i < len(order):
            row, longest = order[i], order[begin]
            fits = (i - begin + 1) * entries[longest] <= max_entries
            similar = entries[row] >= MIN_FILL * entries[longest]
            if queries[row] == queries[longest] <= BATCHED_QUERIES and fits and similar:
                continue
        yield order[begin:i]
        begin = i


def _group(
    batch: AttentionBatch, shape: HeadShape, window: int | None, dtype: torch.dtype, rows: I64, first_pages: I64
) -> RowGroup:
    device = batch.positions.device
    queries, lengths = int(batch.q_lens[rows[0]]), batch.kv_lens_host[rows].astype(np.int64)
    single, is_batched = len(rows) == 1, queries <= BATCHED_QUERIES
    entries = lengths - first_pages * batch.page_size
    num_pages = -(-int(entries.max()) // batch.page_size)
    num_entries = int(entries[0]) if single else num_pages * batch.page_size
    tokens = batch.q_indptr_host[rows].astype(np.int64)[:, None] + np.arange(queries)
    is_causal = not is_batched and queries == lengths[0] and (window is None or window >= queries)
    mask = None
    if not is_causal:
        # Queries are stacked head by head when batched, so each head of the group repeats a mask of several queries.
        mask = _mask(batch, window, dtype, lengths, first_pages, tokens, num_entries)
        if mask is not None and is_batched and queries > 1:
            mask = mask.repeat(1, 1, shape.group, 1)
    beyond = np.arange(num_entries) >= entries[:, None]
    hidden = np.broadcast_to(beyond[:, None], (2, len(rows), shape.num_kv_heads, num_entries)).reshape(-1).nonzero()[0]
    return RowGroup(
        tokens=slice(int(tokens[0, 0]), int(tokens[0, -1]) + 1)
        if single
        else torch.from_numpy(tokens.ravel()).to(device),
        num_rows=len(rows),
        num_queries=queries,
        num_entries=num_entries,
        blocks=_blocks(batch, shape.num_kv_heads, rows, first_pages, num_pages),
        hidden=torch.from_numpy(hidden).to(device) if len(hidden) else None,
        mask=mask,
        is_batched=is_batched,
        is_causal=bool(is_causal),
    )


def _blocks(batch: AttentionBatch, heads: int, rows: I64, first_pages: I64, num_pages: int) -> Tensor:
    device = batch.positions.device
    # A shorter row's missing pages are its last one again: any valid page will do, they are hidden.
    index = (batch.kv_indptr_host[rows] + first_pages)[:, None] + np.arange(num_pages)
    index = np.minimum(index, batch.kv_indptr_host[rows + 1][:, None] - 1)
    pages = batch.kv_page_ids[torch.from_numpy(index).to(device)]
    half = torch.arange(2, dtype=torch.int32, device=device).view(2, 1, 1, 1)
    head = torch.arange(heads, dtype=torch.int32, device=device).view(1, 1, heads, 1)
    return ((pages[None, :, None, :] * 2 + half) * heads + head).flatten()


def _mask(
    batch: AttentionBatch,
    window: int | None,
    dtype: torch.dtype,
    lengths: I64,
    first_pages: I64,
    tokens: I64,
    num_entries: int,
) -> Tensor | None:
    """[B, 1, Q, E] with 0 where query tokens [B, Q] see an entry and -inf elsewhere; None when they see all."""
    queries = tokens.shape[1]
    entry = first_pages[:, None, None] * batch.page_size + np.arange(num_entries)
    visible = entry <= (lengths[:, None] - queries + np.arange(queries))[:, :, None]
    if window is not None:
        visible &= batch.positions.cpu().numpy()[tokens][:, :, None] - entry < window
    if visible.all():
        return None
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return mask[:, None].to(batch.positions.device)
