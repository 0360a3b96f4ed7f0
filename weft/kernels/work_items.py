"""What attention does in a pass, divided into work items: tables of int32 that kernels follow.

Owns the division of rows into items and the layout of the tables. A row of few queries (decoding) becomes *splits* of
`CHUNK` KV entries each, so that few long rows fill a device too, and *merges* that put them together; a row of many
queries (prefill) becomes *tiles* of queries. How a row is divided follows from the row and the geometry of the layer
alone, so it gets the same result in any company.

A table may have more items than the rows need; an item with no query is done at once. So a captured graph, whose tables
have a fixed size and place on the device, serves any rows whose items fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from weft.core.step import I32

I64 = npt.NDArray[np.int64]
CHUNK = 256
"""KV entries of a split. A constant, because a row's splits must not depend on the batch."""
ITEM_FIELDS = 8
"""First query token, query tokens, first entry in the page ids, KV entries, row, first query, first KV entry, first row
in the scratch tensors (-1: the item has all entries that its queries see)."""
MERGE_FIELDS = 4
"""Query token, its first row in the scratch tensors, the step to the next split's, number of splits (0: none)."""


class Cuts(NamedTuple):
    """How attention of one geometry divides rows."""

    decode_queries: int
    """The most queries of a row that is split."""
    tile_queries: int
    """Queries of a tile of other rows."""


class RowExtents(NamedTuple):
    """The rows of a pass, on the host."""

    q_indptr: I32
    """[R + 1]"""
    kv_indptr: I32
    """[R + 1], entries in the page ids"""
    kv_lens: I32
    """[R] KV entries"""


class WorkItems(NamedTuple):
    """The items of some rows, on the host."""

    splits: I32
    """[S, 8]"""
    tiles: I32
    """[N, 8]; those that see most come first, so that no one ends alone"""
    merges: I32
    """[M, 4]: a query token each, of the rows that have several splits"""
    num_partials: int
    """Rows of the scratch tensors that the splits use."""


class WorkTables(NamedTuple):
    """The same on a device, perhaps with items that have no query."""

    splits: Tensor
    tiles: Tensor
    merges: Tensor


def divide(
    rows: RowExtents, cuts: Cuts, chosen: npt.NDArray[np.bool_] | None = None, first_partial: int = 0
) -> WorkItems:
    """The items of the rows that are `chosen` (None: all), whose partial results begin at `first_partial`."""
    queries = np.diff(rows.q_indptr)
    taken = queries > 0 if chosen is None else chosen & (queries > 0)
    is_decode = queries <= cuts.decode_queries
    index = np.flatnonzero(taken & is_decode)
    splits = np.maximum(-(-rows.kv_lens[index] // CHUNK), 1).astype(np.int64)
    partials = np.where(splits > 1, splits * queries[index], 0)
    first_partials = first_partial + np.cumsum(partials) - partials
    place, split = _repeat(np.arange(len(index)), splits)
    partial = np.where(splits[place] > 1, first_partials[place] + split * queries[index[place]], -1)
    several = np.flatnonzero(splits > 1)
    return WorkItems(
        splits=_items(rows, queries, index[place], np.zeros_like(split), split * CHUNK, partial),
        tiles=_tiles(rows, queries, np.flatnonzero(taken & ~is_decode), cuts.tile_queries),
        merges=_merges(rows, queries, index[several], first_partials[several], splits[several]),
        num_partials=int(partials.sum()),
    )


def _tiles(rows: RowExtents, queries: npt.NDArray[Any], index: I64, tile: int) -> I32:
    row, number = _repeat(index, -(-queries[index] // tile))
    last = np.minimum((number + 1) * tile, queries[row])
    order = np.argsort(queries[row] - last - rows.kv_lens[row], kind="stable")
    row, number = row[order], number[order]
    return _items(rows, queries, row, number * tile, np.zeros_like(number), np.full_like(number, -1))


def _items(rows: RowExtents, queries: npt.NDArray[Any], row: I64, query: I64, begin: I64, partial: I64) -> I32:
    first_token, first_page = rows.q_indptr[row], rows.kv_indptr[row]
    fields = (first_token, queries[row], first_page, rows.kv_lens[row], row, query, begin, partial)
    return np.stack(fields, axis=1).astype(np.int32)


def _merges(rows: RowExtents, queries: npt.NDArray[Any], index: I64, first_partials: I64, splits: I64) -> I32:
    place, query = _repeat(np.arange(len(index)), queries[index])
    row = index[place]
    fields = (rows.q_indptr[row] + query, first_partials[place] + query, queries[row], splits[place])
    return np.stack(fields, axis=1).astype(np.int32)


def _repeat(values: I64, counts: npt.NDArray[Any]) -> tuple[I64, I64]:
    """Each value `counts` times, and which time it is."""
    repeated = np.repeat(values, counts)
    return repeated, np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
