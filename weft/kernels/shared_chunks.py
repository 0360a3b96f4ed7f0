"""Which chunks of KV several rows of a batch read in common: found once per pass, used by every layer.

A chunk is a run of entries on a grid that every row has in common, so a shared prompt falls into the same chunks for
all rows that start with it. Rows whose pages of a chunk are the same are a group, and the chunk need be read only once
for all of them (Parrot, section 7; Hydragen, Juravsky et al., 2024). Partial results are per row and chunk either way
and are joined in the same order, so what a row yields does not depend on who shares its chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.core.step import I32
from weft.kernels.batch import AttentionBatch


class SharedChunks(NamedTuple):
    """G groups, and M = their members in all. A member is one row's share of one chunk."""

    group_chunks: I32
    """[G] which chunk of its rows each group reads."""
    group_indptr: I32
    """[G + 1] into `members`."""
    members: I32
    """[M] rows, by group."""
    row_indptr: I32
    """[R + 1] into `slots`: one entry for each chunk that a row could share."""
    slots: I32
    """The place of (row, chunk) in `members`; -1: the row reads this chunk on its own."""


def find(batch: AttentionBatch, chunk: int, max_queries: int) -> SharedChunks | None:
    """The groups of two rows and more, or None where there are none.

    Only whole chunks of `chunk` entries count that all queries of a row see: of plain rows with at most `max_queries`
    queries. `chunk` must be a multiple of the page size; else nothing is shared.
    """
    if chunk % batch.page_size or batch.num_rows < 2 or max_queries < 1:
        return None
    rows = np.flatnonzero(batch.plain_rows & (batch.q_lens > 0) & (batch.q_lens <= max_queries))
    first = batch.kv_indptr_host[:-1]
    rows = rows[batch.kv_lens_host[rows] - batch.q_lens[rows] + 1 >= chunk]
    if len(rows) < 2:
        return None
    pages = batch.kv_page_ids.numpy()
    leading = pages[first[rows]]
    _, inverse, counts = np.unique(leading, return_inverse=True, return_counts=True)
    rows = rows[counts[inverse] > 1]
    if len(rows) < 2:
        return None
    per_chunk = chunk // batch.page_size
    num_chunks = np.zeros(batch.num_rows, np.int64)
    num_chunks[rows] = (batch.kv_lens_host[rows] - batch.q_lens[rows] + 1) // chunk
    row_indptr = np.concatenate(([0], np.cumsum(num_chunks)))
    row_of = np.repeat(np.arange(batch.num_rows), num_chunks)
    chunk_of = np.arange(len(row_of)) - row_indptr[row_of]
    table = pages[(first[row_of] + chunk_of * per_chunk)[:, None] + np.arange(per_chunk)]
    # Equal chunks become neighbours by sorting them as strings of bytes, their number in front.
    keys = np.column_stack((chunk_of.astype(np.int32), table)).astype(np.int32)
    flat = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1] * 4))).ravel()
    order = np.argsort(flat, kind="stable")
    starts = np.flatnonzero(np.concatenate(([True], flat[order][1:] != flat[order][:-1])))
    sizes = np.diff(np.concatenate((starts, [len(order)])))
    shared = sizes > 1
    if not shared.any():
        return None
    entries = order[np.repeat(shared, sizes)]
    slots = np.full(len(order), -1, np.int32)
    slots[entries] = np.arange(len(entries))
    return SharedChunks(
        group_chunks=chunk_of[order[starts[shared]]].astype(np.int32),
        group_indptr=np.concatenate(([0], np.cumsum(sizes[shared]))).astype(np.int32),
        members=row_of[entries].astype(np.int32),
        row_indptr=row_indptr.astype(np.int32),
        slots=slots,
    )
