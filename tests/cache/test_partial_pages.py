"""A page that begins as a prompt does is copied where there is room, and left alone where there is none."""

from __future__ import annotations

from array import array

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache

RUN = array("i", range(8))
PROMPT = array("i", [0, 1, 2, 3, 4, 90, 91, 92, 93])


def cache_with_one_run(num_pages: int) -> KVCache:
    """`RUN`, one page, is in the prefix index and no sequence uses it."""
    cache = KVCache(num_device_pages=num_pages, page_size=8, max_pinned_fraction=1.0)
    table = cache.open_table(1, "")
    assert cache.prepare_write(table, 0, 8, 0.0)
    cache.commit(table, RUN, 8, 0.0)
    cache.free(table, RUN, 8, 0.0)
    cache.close(table, 0.0)
    assert cache.num_available == num_pages
    return cache


def test_a_page_that_begins_alike_is_copied() -> None:
    cache = cache_with_one_run(2)
    table = cache.open_table(2, "")
    tokens = PROMPT.tobytes()
    assert cache.acquire(table, cache.lookup(table, tokens, 8), tokens, 8, 1.0).num_tokens == 5
    assert len(cache.take_copies().page_copies) == 1
    check_integrity(cache, [table])


def test_without_room_for_the_copy_its_source_is_not_given_up_for_it() -> None:
    cache = cache_with_one_run(2)
    other = cache.open_table(2, "")
    assert cache.prepare_write(other, 0, 8, 0.0)
    table = cache.open_table(3, "")
    tokens = PROMPT.tobytes()
    assert cache.acquire(table, cache.lookup(table, tokens, 8), tokens, 8, 1.0).num_tokens == 0
    assert not any(cache.take_copies())
    # A page fenced by the step being built, which has nothing to do, would be lost to all.
    assert cache.tiers.device.num_fenced == 0
    assert cache.prepare_write(table, 0, 8, 1.0)
    check_integrity(cache, [other, table])


def test_a_tree_deeper_than_the_stack_is_forgotten() -> None:
    depth = 1500
    cache = KVCache(depth + 2, 0, 4)
    table = cache.open_table(1, "")
    tokens, forks = array("i"), []
    for number in range(depth):
        tokens.extend([number] * 4)
        assert cache.prepare_write(table, number * 4, len(tokens), 0.0)
        cache.commit(table, tokens, len(tokens), 0.0)
        forks.append(cache.fork(table, 2 + number))  # so that the next page is a node of its own
    for one in (*forks, table):
        cache.free(one, tokens, one.num_indexed * 4, 0.0)
    (tree,) = cache.trees().values()
    assert len(list(tree.nodes())) == depth
    cache.tiers.copies.launched = cache.tiers.copies.building
    cache.tiers.step_completed(cache.tiers.copies.launched)
    cache.reset(1.0)
    assert not list(tree.nodes())
