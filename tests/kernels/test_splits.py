"""The tables of splits, against the rules written out one entry at a time."""

from __future__ import annotations

import numpy as np
import pytest

from weft.kernels import splits


def tables(first_pages: list[int], kv_lens: list[int], num_items: int) -> tuple[list[list[int]], list[list[int]]]:
    items, merges, partial = [], [], 0
    for row, (page, length) in enumerate(zip(first_pages, kv_lens, strict=True)):
        begins = list(range(0, length, splits.CHUNK)) or [0]
        several = len(begins) > 1
        merges.append([row, partial, 1, len(begins) if several else 0])
        for begin in begins:
            items.append([row, 1, page, length, row, 0, begin, partial if several else -1])
            partial += several
    return items + [[0] * splits.ITEM_FIELDS] * (num_items - len(items)), merges


@pytest.mark.parametrize(
    "kv_lens", [[1], [0], [256], [257], [3, 700, 0, 512, 513, 1], [0, 0, 0], [1000] * 5, [300, 2, 300, 256]]
)
def test_tables(kv_lens: list[int]):
    lens = np.array(kv_lens, np.int32)
    needed = splits.num_items(lens)
    assert needed == len(tables(kv_lens, kv_lens, 0)[0])
    first_pages = np.cumsum([0, *(-(-n // 16) for n in kv_lens[:-1])]).astype(np.int32)
    for spare in (0, 3):
        # What an earlier step left there must not show.
        items = np.full((needed + spare, splits.ITEM_FIELDS), 99, np.int32)
        merges = np.full((len(lens), splits.MERGE_FIELDS), 99, np.int32)
        splits.fill(first_pages, lens, items, merges)
        expected = tables(first_pages.tolist(), kv_lens, needed + spare)
        assert (items.tolist(), merges.tolist()) == expected
