"""Tables that share pages which the prefix index has for one of them: the others lock no more than these pages."""

from __future__ import annotations

from array import array

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.cache.page_table import PageTable

PAGE = 4
PROMPT = array("i", range(16))
LONG = array("i", [*range(16), *range(100, 132)])


def finish_step(cache: KVCache) -> None:
    cache.tiers.copies.launched += 1
    cache.take_copies()
    cache.tiers.step_completed(cache.tiers.copies.launched)


def duplicates() -> tuple[KVCache, PageTable, PageTable]:
    """A cache of 16 pages; a table with four pages that equal others, so the index has not got them; and its fork, with
    eight pages more."""
    cache = KVCache(16, 0, PAGE)
    tables = [cache.open_table(9, ""), cache.open_table(1, "")]
    for table in tables:
        assert cache.prepare_write(table, 0, 16, 0.0)
        finish_step(cache)
        cache.commit(table, PROMPT, 16, 0.0)
    equal, table = tables
    assert not table.indexable
    fork = cache.fork(table, 2)
    cache.free(equal, PROMPT, 16, 1.0)
    cache.close(equal, 1.0)
    cache.reset(1.0)
    assert cache.prepare_write(fork, 16, 48, 1.0)
    finish_step(cache)
    assert cache.num_available == 4
    return cache, table, fork


def test_a_fork_that_is_given_up_locks_only_the_pages_that_it_shares() -> None:
    cache, table, fork = duplicates()
    cache.free(fork, LONG, 48, 2.0, wait=Wait(2, "", "program", 2.0, is_open=True))
    check_integrity(cache, [table, fork])
    assert cache.num_available == 12
    assert cache.prepare_write(table, 16, 64, 3.0)


def test_a_table_that_is_cut_locks_only_what_it_keeps() -> None:
    cache, table, fork = duplicates()
    cache.free(fork, LONG, 48, 2.0, wait=Wait(2, "", "program", 2.0, is_open=True))
    cache.truncate(table, 4, 3.0)
    check_integrity(cache, [table, fork])
    assert cache.num_available == 15


def test_a_match_is_stale_once_its_node_has_grown() -> None:
    """A sequence that looked before would get pages with KV of other tokens."""
    cache = KVCache(16, 0, PAGE)
    table = cache.open_table(1, "")
    assert cache.prepare_write(table, 0, 16, 0.0)
    finish_step(cache)
    cache.commit(table, PROMPT, 16, 0.0)
    match = cache.lookup(cache.open_table(2, ""), PROMPT.tobytes(), 16)
    before, num_pages = cache.tiers.num_reshaped, match.node.num_pages
    assert cache.prepare_write(table, 16, 48, 1.0)
    finish_step(cache)
    cache.commit(table, LONG, 48, 1.0)
    assert match.node.num_pages > num_pages
    assert cache.tiers.num_reshaped > before
