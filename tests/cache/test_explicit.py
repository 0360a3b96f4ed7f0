"""Runs of explicit pages: given up to the host alone, and counted as available as far as it has room."""

from __future__ import annotations

from array import array
from collections import Counter

from weft.cache.explicit import ExplicitRun
from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.cache.nodes import Wait


class Cache:
    """A cache on which a step is launched and done after every call."""

    def __init__(self, num_device_pages: int, num_host_pages: int):
        self.cache = KVCache(num_device_pages, num_host_pages, page_size=8)
        self.held = Counter[int]()
        """Device pages that the test has."""
        self.now = 0.0
        self.step()

    def step(self, copy_budget: int = 64) -> None:
        copies = self.cache.tiers.copies
        self.cache.take_copies()
        copies.launched += 1
        self.cache.tiers.step_completed(copies.launched)
        self.now += 1.0
        self.cache.tiers.begin_step(copy_budget)
        check_integrity(self.cache, [], self.held)

    def take(self, count: int) -> list[int] | None:
        pages = self.cache.allocate(count, self.now)
        self.held.update(pages or [])
        return pages

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.cache.tiers.drop_ref(page, self.now)
        self.held -= Counter(pages)
        self.step()

    def lend(self, count: int) -> ExplicitRun:
        pages = self.take(count)
        assert pages is not None
        self.held -= Counter(pages)
        return self.cache.explicit.lend(pages, Wait(1, "t", "http", self.now, is_open=True), 0, self.now)

    def cached(self, num_pages: int) -> None:
        """A prefix that nothing uses."""
        table = self.cache.open_table(1, "n")
        tokens = array("i", range(num_pages * 8))
        assert self.cache.prepare_write(table, 0, len(tokens), self.now)
        self.cache.free(table, tokens, len(tokens), self.now)
        self.cache.close(table, self.now)
        self.step()


def on_device(run: ExplicitRun) -> int:
    return sum(node.num_pages for node in run.nodes() if node.on_device)


def test_as_many_pages_are_available_as_the_host_has_room_for() -> None:
    cache = Cache(10, 3)
    run = cache.lend(6)
    cache.cached(1)
    assert cache.take(3) is not None
    assert cache.cache.num_available == 3 + 1
    assert cache.take(5) is None
    pages = cache.take(4)
    assert pages is not None, "three go to the host, though the run is asked for four first"
    assert (on_device(run), run.num_missing, cache.cache.num_available) == (3, 3, 0)
    cache.give_back(pages)
    while not cache.cache.explicit.bring(run, cache.now):
        cache.step()
    cache.step()
    assert cache.cache.num_available == 4 - 3
    back = cache.cache.explicit.take_back(run, cache.now)
    cache.held.update(back)
    assert len(set(back)) == 6
    cache.step()
    assert cache.cache.tiers.host.num_free == 3


def test_a_run_comes_back_in_parts_and_may_be_taken_again_meanwhile() -> None:
    cache = Cache(6, 6)
    run = cache.lend(6)
    pages = cache.take(6)
    assert pages is not None
    cache.give_back(pages)
    explicit, tiers = cache.cache.explicit, cache.cache.tiers
    for there in (2, 4):
        cache.step(2)
        assert not explicit.bring(run, cache.now)
        assert (on_device(run), tiers.num_available) == (there, 6 - there)
    cache.step()
    explicit.release(run, cache.now)
    assert tiers.num_available == 6
    pages = cache.take(5)
    assert pages is not None
    assert not tiers.copies.take().swap_outs, "the host has all of it"
    assert run.num_missing == 5
    explicit.drop(run, cache.now)
    cache.step()
    cache.give_back(pages)
    assert (tiers.device.num_free, tiers.host.num_free) == (6, 6)


def test_a_run_that_the_host_has_no_room_for_pushes_nothing_out_of_it() -> None:
    cache = Cache(10, 4)
    cache.cached(3)
    assert cache.take(10) is not None, "the prefix moves to the host"
    cache.give_back(list(cache.held))
    run = cache.lend(6)
    assert run.wait.end is not None
    cache.cache.move_out(run.wait.end, cache.now)
    assert (on_device(run), cache.cache.tiers.host.num_free) == (6, 1)
