"""The division of rows into work items, against the rules written out one item at a time."""

from __future__ import annotations

import numpy as np
import pytest

from weft.kernels.work_items import CHUNK, ITEM_FIELDS, MERGE_FIELDS, Cuts, RowExtents, divide

CUTS = Cuts(decode_queries=4, tile_queries=32)
Row = tuple[int, int]
"""Queries, KV entries."""


def make_rows(rows: list[Row]) -> RowExtents:
    """Rows of 16 entries to a page."""
    queries, lens = (np.array(part, np.int32).reshape(-1) for part in zip(*rows, strict=True))
    pages = -(-lens // 16)
    return RowExtents(*(np.cumsum([0, *counts]).astype(np.int32) for counts in (queries, pages)), kv_lens=lens)


def written_out(rows: list[Row], chosen: list[int], partial: int) -> tuple[list[list[int]], ...]:
    """Splits, tiles in the order of rows, merges."""
    splits, tiles, merges = [], [], []
    token = page = 0
    for row, (queries, entries) in enumerate(rows):
        head = [token, queries, page, entries, row]
        if row not in chosen or not queries:
            pass
        elif queries > CUTS.decode_queries:
            tiles += [[*head, first, 0, -1] for first in range(0, queries, CUTS.tile_queries)]
        else:
            begins = list(range(0, entries, CHUNK)) or [0]
            several = len(begins) > 1
            if several:
                merges += [[token + query, partial + query, queries, len(begins)] for query in range(queries)]
            for begin in begins:
                splits.append([*head, 0, begin, partial if several else -1])
                partial += queries if several else 0
        token, page = token + queries, page + -(-entries // 16)
    return splits, tiles, merges


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 0)],
        [(1, 256), (1, 257), (1, 512), (1, 513)],
        [(1, 3), (1, 700), (0, 5), (1, 512)],
        [(4, 300), (5, 300), (1, 1000), (2, 2000), (0, 0), (64, 64), (65, 900), (3, 3)],
        [(200, 200)] * 3,
    ],
)
def test_items(rows: list[Row]) -> None:
    for chosen in (list(range(len(rows))), list(range(0, len(rows), 2)), []):
        for first_partial in (0, 7):
            mask = np.isin(np.arange(len(rows)), chosen)
            found = divide(make_rows(rows), CUTS, mask, first_partial)
            splits, tiles, merges = written_out(rows, chosen, first_partial)
            assert (found.splits.tolist(), found.merges.tolist()) == (splits, merges)
            assert sorted(found.tiles.tolist()) == sorted(tiles)
            assert [part.shape[1] for part in found[:3]] == [ITEM_FIELDS, ITEM_FIELDS, MERGE_FIELDS]
            assert all(part.dtype == np.int32 for part in found[:3])
            ends = [first + step * (count - 1) + 1 for _, first, step, count in merges]
            assert found.num_partials == max(ends, default=first_partial) - first_partial


def test_all_rows_are_chosen_where_none_are_named() -> None:
    rows = make_rows([(1, 700), (40, 40)])
    named = divide(rows, CUTS, np.ones(2, np.bool_))
    assert [np.array_equal(a, b) for a, b in zip(divide(rows, CUTS), named, strict=True)] == [True] * 4


def test_tiles_that_see_most_come_first() -> None:
    found = divide(make_rows([(64, 64), (33, 5000), (64, 70)]), CUTS)
    last = [min(query + CUTS.tile_queries, queries) for _, queries, *_, query, _, _ in found.tiles]
    seen = [end + tile[3] - tile[1] for end, tile in zip(last, found.tiles, strict=True)]
    assert seen == sorted(seen, reverse=True)
