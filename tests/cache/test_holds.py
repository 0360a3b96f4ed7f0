"""Held KV is given up after all that is not held, and within the shares of tenants."""

from __future__ import annotations

from array import array

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.cache.nodes import Wait


def finish(cache: KVCache, seq: int, tokens: list[int], now: float, *, hold: bool, tenant: str = "a") -> bool:
    """Compute the tokens in a sequence of their own, and end it. Whether it is held."""
    known = array("i", tokens)
    table = cache.open_table(seq, tenant, tenant)
    assert cache.prepare_write(table, 0, len(known), now)
    wait = Wait(seq, tenant, "hold", now, is_open=False, num_tokens=len(known))
    run = None
    if hold:
        run = cache.retention.add(table.node, len(table.pages) - table.num_indexed, 1.0, now + 100.0, now)
    cache.free(table, known, len(known), now, wait=wait)
    if run is not None:
        cache.retention.attach(run, wait)
    cache.close(table, now)
    return run is not None


def found(cache: KVCache, tokens: list[int], now: float) -> int:
    """How many of the tokens a new sequence finds."""
    known = array("i", tokens).tobytes()
    table = cache.open_table(99, "a")
    count = cache.acquire(table, cache.lookup(table, known, len(tokens)), known, len(tokens), now).num_tokens
    cache.free(table, array("i"), 0, now)
    cache.close(table, now)
    return count


def test_a_held_sequence_outlives_one_that_was_used_later() -> None:
    cache = KVCache(num_device_pages=8, page_size=8, max_pinned_fraction=1.0)
    assert finish(cache, 1, list(range(20)), 0.0, hold=True)
    finish(cache, 2, list(range(100, 120)), 5.0, hold=False)
    writer = cache.open_table(3, "")
    assert cache.prepare_write(writer, 0, 40, 6.0), "two pages are free, three are given up"
    check_integrity(cache, [writer])
    cache.free(writer, array("i"), 0, 6.0)
    assert found(cache, [*range(20), 1], 7.0) == 20, "the last page, which is not full, included"
    assert found(cache, [*range(100, 120), 1], 7.0) == 0


def test_a_hold_never_blocks_a_writer() -> None:
    cache = KVCache(num_device_pages=3, page_size=8, max_pinned_fraction=1.0)
    assert finish(cache, 1, list(range(20)), 0.0, hold=True)
    writer = cache.open_table(2, "")
    assert cache.prepare_write(writer, 0, 24, 1.0)
    cache.retention.expire(1.0)
    assert cache.retention.num_held == 0, "nothing of it is left"
    check_integrity(cache, [writer])


def test_the_end_of_a_hold_leaves_its_pages_as_evictable_as_any() -> None:
    cache = KVCache(num_device_pages=8, page_size=8, max_pinned_fraction=1.0)
    assert finish(cache, 1, list(range(20)), 0.0, hold=True)
    finish(cache, 2, list(range(100, 120)), 5.0, hold=False)
    cache.retention.expire(100.0)
    writer = cache.open_table(3, "")
    assert cache.prepare_write(writer, 0, 40, 101.0)
    cache.free(writer, array("i"), 0, 101.0)
    assert found(cache, [*range(100, 120), 1], 102.0) == 20
    assert found(cache, [*range(20), 1], 102.0) == 0


def test_a_tenant_cannot_hold_what_another_has_a_share_of() -> None:
    """Holds take 12 pages at most, and each of these takes 2."""
    cache = KVCache(num_device_pages=40, page_size=8, max_pinned_fraction=0.3)

    def hold(seq: int, tenant: str) -> bool:
        return finish(cache, seq, [seq * 100 + i for i in range(16)], float(seq), hold=True, tenant=tenant)

    assert [hold(seq, "greedy") for seq in range(1, 9)] == [True] * 6 + [False] * 2
    # A neighbour takes a share of them; the hold that would end first goes first.
    assert [hold(seq, "neighbour") for seq in range(10, 14)] == [True, True, True, False]
    # Neither has more than the other would have then.
    assert not hold(14, "greedy")
    assert cache.retention.num_held == 6
    check_integrity(cache, [])
