"""Holds give way to sequences that need their pages."""

from __future__ import annotations

from array import array

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache


def test_a_write_needs_no_copy_of_a_page_that_only_an_ended_hold_shared() -> None:
    cache = KVCache(num_device_pages=3, page_size=8, max_pinned_fraction=1.0)
    tokens = array("i", range(12))
    held = cache.open_table(1, "")
    assert cache.prepare_write(held, 0, 12, 0.0)
    writer = cache.fork(held, 2)
    assert cache.retention.hold(held, tokens, 12, 100.0, 0.0)
    # Two pages exist and one is free: with the hold, the partial page would have to be copied, and two are too few.
    assert cache.write_cost(writer, 12, 24) == 2
    assert not cache.prepare_write(writer, 12, 24, 1.0)
    assert cache.retention.first_hold() == 1
    assert cache.retention.end_one_hold()
    assert cache.retention.first_hold() is None
    assert cache.prepare_write(writer, 12, 24, 1.0)
    assert len(writer.pages) == 3
    check_integrity(cache, [held, writer])
