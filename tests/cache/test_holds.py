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


def test_a_tenant_cannot_hold_what_another_has_a_share_of() -> None:
    """Holds take 12 pages at most, and each of these takes 3."""
    cache = KVCache(num_device_pages=40, page_size=8, max_pinned_fraction=0.3)
    retention = cache.retention

    def hold(seq: int, tenant: str) -> bool:
        tokens = array("i", [seq * 100 + i for i in range(16)])
        table = cache.open_table(seq, tenant)
        assert cache.prepare_write(table, 0, 16, 0.0)
        kept = retention.hold(table, tokens, 16, 100.0 + seq, 0.0, tenant)
        cache.close(table, 0.0)
        return kept

    assert [hold(seq, "greedy") for seq in range(1, 7)] == [True] * 4 + [False] * 2
    # A neighbour takes a share of them; the hold that would end first goes first.
    assert [hold(seq, "neighbour") for seq in range(7, 10)] == [True, True, False]
    assert retention.first_hold() == 3
    # Neither has more than the other would have then.
    assert not hold(10, "greedy")
    assert retention.num_held == 4
    check_integrity(cache, [])
