"""Which runs are of use to others, for how long they were not, and that a run in parts stays one."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.cache.nodes import Node, Wait, parts_behind
from weft.cache.runs import PREFIX, UNUSED, PageRuns, Ranking
from weft.core.ids import pack_tokens

PAGE = 4


class Noted:
    """A cache whose policy goes by last use, and what it was told."""

    def __init__(self, num_pages: int, num_host_pages: int = 0, *, moves: bool = True):
        self.cache = KVCache(num_pages, num_host_pages, PAGE)
        self.told: list[tuple[str, float]] = []
        self.given_up: list[tuple[str, float]] = []
        self.runs: list[PageRuns] = []
        self.moves = moves

        def rank(runs: PageRuns, now: float) -> Ranking:
            self.runs.append(runs)
            count = len(runs.since_s)
            return Ranking(runs.since_s, np.full(count, self.moves), *np.zeros((2, count), np.bool_), runs.since_s)

        def note(tenant: str, kind: str, seconds: float, was_used: bool, since_s: float = math.nan) -> None:
            (self.told if was_used else self.given_up).append((kind, seconds))

        self.cache.tiers.rank_by(rank, dict, note)

    def leave(self, tokens: list[int], now: float, wait: Wait | None = None) -> None:
        """Compute tokens and close the sequence."""
        cache = self.cache
        table = cache.open_table(1, "")
        known = pack_tokens(tokens)
        match = cache.lookup(table, known, len(tokens) - 1)
        found = cache.acquire(table, match, known, len(tokens) - 1, now).num_tokens
        assert cache.prepare_write(table, found, len(tokens), now)
        cache.free(table, array("i", tokens), len(tokens), now, wait=wait)
        cache.close(table, now)
        self.step()

    def step(self) -> None:
        tiers = self.cache.tiers
        tiers.copies.take()
        tiers.copies.launched = tiers.copies.building
        tiers.step_completed(tiers.copies.launched)
        tiers.begin_step(1000)
        check_integrity(self.cache, [])


def test_a_run_is_unused_until_another_sequence_finds_it() -> None:
    noted = Noted(16)
    noted.leave([1] * 8, 1.0)
    noted.leave([1] * 8 + [2] * 4, 4.0)
    noted.leave([1] * 8 + [3] * 4, 9.0)
    assert noted.told == [(UNUSED, 3.0), (PREFIX, 5.0)]


def test_a_run_that_goes_before_it_was_of_use_is_noted_once() -> None:
    noted = Noted(6)
    noted.leave([1] * 16, 1.0)
    for turn in range(4):
        noted.leave([10 + turn] * 4, 2.0 + turn)
    assert noted.given_up == [], "only a part of it has gone"
    noted.leave([9] * 24, 9.0)
    lasted = [9.0 - since_s for since_s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert sorted(noted.given_up) == sorted((UNUSED, wait_s) for wait_s in lasted), "each, in however many pieces"
    assert noted.told == []


def test_a_run_that_the_host_forgets_in_pieces_is_noted_once() -> None:
    noted = Noted(8, 8)
    noted.leave([1] * 32, 1.0)
    for turn in range(16):
        noted.leave([10 + turn] * 4, 2.0 + turn)
    gone = [node for node in next(iter(noted.cache.trees().values())).nodes() if node.tokens[:4] == pack_tokens([1])]
    assert gone == []
    assert [kind for kind, _ in noted.given_up] == [UNUSED]


def test_a_turn_that_nobody_continues_is_noted_when_its_pages_go() -> None:
    noted = Noted(6)
    noted.leave([1] * 18, 1.0, Wait(1, "", "chat", 1.0, is_open=False, num_tokens=18))
    noted.leave([2] * 16, 2.0)
    assert noted.given_up == [("chat", 1.0)]


def test_a_run_that_goes_page_by_page_is_one_run_on_the_host_and_is_ranked_as_its_wait() -> None:
    noted = Noted(8, 32)
    wait = Wait(1, "", "tool", 1.0, is_open=True)
    noted.leave([1] * 32, 1.0, wait)
    for turn in range(3):
        noted.leave([10 + turn] * 4, 2.0 + turn)
    (tree,) = noted.cache.trees().values()
    nodes = [node for node in tree.nodes() if node.tokens.startswith(pack_tokens([1]))]
    assert [node.num_pages for node in nodes] == [5, 3], "the rest on the device, and all that went"
    assert [node.on_device for node in nodes] == [True, False]
    assert wait.end is nodes[1]
    assert parts_behind(nodes[0]) == [nodes[1]]
    noted.leave([20] * 4, 9.0)
    last = noted.runs[-1]
    assert "tool" in [last.kinds[kind] for kind in last.kind.tolist()]
    noted.cache.tiers.end_wait(wait)
    noted.leave([21] * 4, 10.0)
    assert "tool" not in [last.kinds[kind] for kind in noted.runs[-1].kind.tolist()]


def test_what_is_not_worth_a_copy_leaves_the_host_first_and_gets_none() -> None:
    noted = Noted(8, 32, moves=False)
    noted.leave([1] * 32, 1.0)
    noted.leave([2] * 16, 2.0)
    assert noted.cache.tiers.host.num_free == 32
    noted.moves = True
    noted.leave([3] * 16, 3.0)
    assert noted.cache.tiers.host.num_free < 32


@pytest.mark.parametrize("costs_more", [True, False])
def test_where_a_step_can_copy_no_more_what_has_a_copy_may_go_first(costs_more: bool) -> None:
    """Two runs of the same age, and the younger one has a copy on the host."""
    noted = Noted(8, 8)
    tiers = noted.cache.tiers

    def rank(runs: PageRuns, now: float) -> Ranking:
        no = np.zeros(len(runs.order), np.bool_)
        forgotten = runs.since_s + 100.0 * (costs_more & ~runs.has_copy)
        return Ranking(runs.since_s, ~no, no, no, forgotten)

    tiers.candidates.rank = tiers.host_candidates.rank = rank
    noted.leave([1] * 16, 1.0)
    noted.leave([2] * 16, 2.0)
    (tree,) = noted.cache.trees().values()
    older, younger = sorted(tree.root.children.values(), key=lambda node: node.last_used_s)
    assert noted.cache.copy_out(younger)
    noted.step()
    tiers.begin_step(0)
    assert tiers.allocate(4, 3.0) is not None
    assert (older.row >= 0, younger.on_device) == ((True, False) if costs_more else (False, True))


def test_the_host_drops_what_was_used_longer_ago_be_it_on_the_device_too_or_not() -> None:
    noted = Noted(6, 4)
    tiers = noted.cache.tiers
    first, second, third = [1] * 8, [2] * 8, [3] * 8

    def node_of(tokens: list[int]) -> Node | None:
        nodes = next(iter(noted.cache.trees().values())).nodes()
        return next((node for node in nodes if node.tokens.startswith(pack_tokens(tokens[:1]))), None)

    for now, tokens in enumerate((first, second, third), 1):
        noted.leave(tokens, float(now))
    copied = node_of(second)
    assert copied is not None
    assert noted.cache.copy_out(copied)
    noted.step()
    noted.leave([*second, 2], 4.0)
    noted.leave([4] * 8, 5.0)
    alone = node_of(first)
    assert alone is not None
    assert not alone.on_device
    assert tiers.host.num_free == 0
    noted.leave([5] * 8, 6.0)
    assert node_of(first) is None, "it was used before the second one, whose copy stays"
    assert copied.on_device
    assert copied.copies


@pytest.mark.parametrize("num_host_pages", [0, 8])
@pytest.mark.parametrize("has_branch", [False, True])
def test_what_a_wait_needs_before_a_run_that_goes_is_ranked_only_if_others_may_need_it(
    num_host_pages: int, has_branch: bool
) -> None:
    noted = Noted(8, num_host_pages)
    noted.leave([1] * 10, 1.0, wait=Wait(1, "", "chat", 1.0, is_open=False))
    if has_branch:
        noted.leave([1] * 8 + [2] * 2, 2.0, wait=Wait(2, "", "chat", 2.0, is_open=False))
    used = 3 + has_branch
    assert noted.cache.tiers.device.num_free == 8 - used
    assert noted.cache.tiers.allocate(8, 3.0) is not None, "the ends go first, which are not full"
    assert [len(runs.order) for runs in noted.runs] == ([2, 1] if has_branch else [1])


def test_a_copy_of_what_a_wait_needs_before_a_run_that_has_none_is_not_lost_with_it() -> None:
    noted = Noted(8, 8)
    noted.leave([1] * 10, 1.0, wait=Wait(1, "", "chat", 1.0, is_open=False))
    tiers = noted.cache.tiers
    (tail,) = tiers.candidates.nodes()
    before = tail.parent
    assert before is not None
    before.copies = tiers.host.allocate(2)
    for page in before.copies:
        tiers.host.index(page)
    noted.moves = False
    assert tiers.allocate(6, 2.0) is not None
    noted.moves = True
    assert tiers.allocate(2, 2.0) is not None
    assert [len(runs.order) for runs in noted.runs] == [1, 1]


@pytest.mark.parametrize("is_found_later", [True, False])
def test_what_the_same_waits_need_before_a_run_that_goes_in_parts_is_ranked_only_if_it_alone_is_used_later(
    is_found_later: bool,
) -> None:
    noted = Noted(8, 8)
    tiers = noted.cache.tiers
    wait = Wait(1, "", "chat", 1.0, is_open=False, num_tokens=16)
    noted.leave([1] * 8 + [2] * 8, 1.0, None if is_found_later else wait)
    noted.leave([1] * 8 + [3] * 4, 2.0)
    (other,) = [node for node in tiers.candidates.nodes() if node.num_pages == 1]
    tiers.forget(other)
    assert tiers.device.num_free == 4
    for count in (5, 3):
        assert tiers.allocate(count, 3.0) is not None
    assert [len(runs.order) for runs in noted.runs] == [1] * (1 + is_found_later)


def test_a_run_that_the_host_forgets_in_one_step_is_ranked_once() -> None:
    noted = Noted(8, 8)
    noted.leave([1] * 32, 1.0, Wait(1, "", "chat", 1.0, is_open=False, num_tokens=32))
    for turn in range(2, 5):
        noted.leave([turn] * 4, float(turn))
    tiers = noted.cache.tiers
    noted.leave([5] * 20, 5.0)
    assert tiers.host.num_free == 0
    noted.runs.clear()
    assert tiers.allocate(3, 6.0) is not None
    assert [sorted(runs.since_s.tolist()) for runs in noted.runs] == [[2.0, 3.0, 4.0, 5.0], [1.0], [2.0], [3.0]]


def test_what_a_step_could_not_copy_the_next_one_copies() -> None:
    """The first step forgets a part of a run, since it may copy one page; the order holds for the second."""
    noted = Noted(64, 64)
    tiers = noted.cache.tiers
    noted.leave([1] * 160, 1.0, Wait(1, "", "chat", 1.0, is_open=False, num_tokens=160))
    for number in range(10, 33):
        noted.leave([number] * 4, 2.0)
    tiers.begin_step(1)
    assert tiers.allocate(tiers.device.num_free + 2, 10.0) is not None
    for _ in range(2):
        free = tiers.host.num_free
        tiers.begin_step(100)
        assert tiers.allocate(2, 10.0) is not None
        assert tiers.host.num_free == free - 2


def test_what_was_used_later_than_a_retained_run_that_goes_is_ranked() -> None:
    noted = Noted(9, moves=False)
    tiers, retention = noted.cache.tiers, noted.cache.retention
    noted.leave([1] * 8, 1.0)
    noted.leave([1] * 8 + [2] * 8, 2.0)
    (end,) = tiers.candidates.nodes()
    retention.retain_prefix(end, 0.5, 100.0, 2.0)
    noted.leave([7] * 8, 3.0)
    noted.leave([1] * 8 + [3] * 4, 5.0)
    (other,) = [node for node in tiers.candidates.nodes() if node.num_pages == 1]
    tiers.forget(other)
    assert tiers.allocate(tiers.device.num_free + 2, 6.0) is not None
    first = tiers.candidates.first(6.0)
    assert first is not None
    assert first.last_used_s == 3.0
