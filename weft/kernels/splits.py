"""Decoding rows divided into splits of `CHUNK` KV entries, as tables of fixed size.

Owns the layout of the tables and how a step's lengths fill them. Attention that is launched for such tables, instead of
for the lengths that the host knows, does the same work wherever they lie on the device: a captured graph then serves
any lengths whose splits fit. A row's splits follow from its own length alone, as they do without tables.

Shapes use: B rows of one query each, S items. A table may have more items than the rows need; an item with no query is
done at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from weft.core.step import I32

CHUNK = 256
"""KV entries of a split. A constant, because a row's splits must not depend on the batch."""
ITEM_FIELDS = 8
"""First query token, query tokens, first entry in the page ids, KV entries, row, first query, first KV entry, first row
in the scratch tensors (-1: the item has the whole row)."""
MERGE_FIELDS = 4
"""Query token, its first row in the scratch tensors, the step to the next split's, number of splits (0: none)."""


class SplitTables(NamedTuple):
    """Both tables, on a device."""

    items: Tensor
    """[S, 8] int32."""
    merges: Tensor | None
    """[B, 4] int32; None: no row can have more than one split, for any lengths."""


def num_items(kv_lens: I32) -> int:
    """How many items rows of these lengths need: at least one each."""
    return int(np.maximum(-(-kv_lens // CHUNK), 1).sum())


def fill(first_pages: I32, kv_lens: I32, items: I32, merges: I32) -> None:
    """Write both tables, items [S, 8] and merges [B, 4], whole.

    Row b is query token b; `first_pages` [B] is its first entry in the page ids and `kv_lens` [B] its KV entries, 0 for
    a row that is padding and gets zeros. S is at least `num_items(kv_lens)`.
    """
    rows = np.arange(len(kv_lens))
    splits = np.maximum(-(-kv_lens // CHUNK), 1)
    ends = np.cumsum(splits)
    total = int(ends[-1])
    row = np.repeat(rows, splits)
    split = np.arange(total) - np.repeat(ends - splits, splits)
    partials = np.where(splits > 1, splits, 0)
    first_partials = np.cumsum(partials) - partials
    items[:] = 0
    used = items[:total]
    used[:, 0] = used[:, 4] = row
    used[:, 1] = 1
    used[:, 2] = first_pages[row]
    used[:, 3] = kv_lens[row]
    used[:, 6] = split * CHUNK
    used[:, 7] = np.where(splits[row] > 1, first_partials[row] + split, -1)
    merges[:, 0] = rows
    merges[:, 1] = first_partials
    merges[:, 2] = 1
    merges[:, 3] = np.where(splits > 1, splits, 0)
