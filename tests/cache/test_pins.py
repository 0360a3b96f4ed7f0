"""Which pins break for a sequence that lacks pages."""

from __future__ import annotations

import math
from array import array

import pytest

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache

PAGE = 8


def pin(cache: KVCache, number: int, num_pages: int) -> None:
    """Pin a prefix of so many pages that nothing else shares."""
    tokens = array("i", [number] * (num_pages * PAGE))
    table = cache.open_table(number, "")
    assert cache.prepare_write(table, 0, len(tokens), 0.0)
    cache.commit(table, tokens, len(tokens), 0.0)
    assert cache.retention.retain_prefix(table.node, math.inf, 1e9, 0.0) is not None
    cache.free(table, tokens, len(tokens), 0.0)
    cache.close(table, 0.0)


@pytest.mark.parametrize(
    ("missing", "broken"), [(1, [1]), (2, [2]), (3, [8]), (6, [8]), (9, [8, 1]), (10, [8, 2]), (11, [8, 2, 1])]
)
def test_the_cheapest_pin_that_is_enough_breaks_and_without_one_the_largest(missing: int, broken: list[int]) -> None:
    cache = KVCache(num_device_pages=13, page_size=PAGE, max_pinned_fraction=1.0)
    for number, num_pages in enumerate((1, 1, 1, 2, 8), 1):
        pin(cache, number, num_pages)
    assert cache.num_available == 0
    freed = []
    while cache.num_available < missing:
        before = cache.num_available
        assert cache.retention.break_pin(missing - before, 1.0)
        freed.append(cache.num_available - before)
    assert freed == broken
    check_integrity(cache, [])
