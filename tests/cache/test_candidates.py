"""What a policy sees of runs that could be given up, step after step, and how many of them are kept for shares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from weft.cache.candidates import Candidates
from weft.cache.nodes import Node, Wait
from weft.cache.runs import PageRuns, Ranking

PAGE_BYTES = 16


class Kept:
    """Candidates of two tenants, of which those with an even number are kept and go last."""

    def __init__(self) -> None:
        self.seen: list[PageRuns] = []
        self.candidates = Candidates(self.rank, 4, 100)
        self.candidates.shares.count_held = lambda: {"a": 30, "b": 40}
        self.root = Node(0, None, b"", 0, PAGE_BYTES, 0.0, owner="a")

    def rank(self, runs: PageRuns, now: float) -> Ranking:
        self.seen.append(runs)
        kept = runs.order % 2 == 0
        values = kept * 100.0 + runs.order
        return Ranking(values, np.ones(len(kept), np.bool_), kept, runs.kind > 1, values)

    def add(self, number: int, num_pages: int, parent: Node | None = None, *, explicit: bool = False) -> Node:
        node = Node(number, parent or self.root, bytes(PAGE_BYTES * num_pages), num_pages, PAGE_BYTES, 0.0)
        node.is_explicit = explicit
        self.candidates.add(node)
        return node

    def num_kept(self, **evictable: int) -> int:
        return self.candidates.num_kept(Counter(evictable), 0.0, None)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_whether_a_run_is_kept_does_not_change_whether_it_is_explicit(number: int, explicit: bool) -> None:
    kept = Kept()
    kept.add(number, 1, explicit=explicit)
    for _ in range(3):
        kept.candidates.begin()
        kept.candidates.first(0.0)
    assert [runs.explicit.tolist() for runs in kept.seen] == [[explicit]] * 3


def test_what_the_last_run_uncovers_counts_once_it_is_kept() -> None:
    kept = Kept()
    parent = Node(2, kept.root, bytes(PAGE_BYTES * 3), 3, PAGE_BYTES, 0.0)
    leaf = kept.add(1, 2, parent)
    other = kept.add(4, 1)
    assert kept.num_kept(a=6) == 1, "an estimate: of the others, only the ends of runs are looked at"
    kept.candidates.discard(leaf)
    kept.candidates.add(parent)
    assert kept.candidates.first(0.0) is parent
    assert kept.num_kept(a=4) == 4
    kept.candidates.discard(other)
    assert kept.num_kept(a=3) == 3


def test_what_is_passed_over_is_not_kept() -> None:
    """It comes free once a step in flight is done, and the runs before it are then the ends."""
    kept = Kept()
    parent = Node(3, kept.root, bytes(PAGE_BYTES * 3), 3, PAGE_BYTES, 0.0)
    fenced = kept.add(1, 2, parent)
    kept.add(4, 5)
    assert kept.candidates.first(0.0) is fenced
    kept.candidates.skip(fenced)
    assert kept.num_kept(a=10) == 5


def test_what_a_step_cannot_move_any_more_is_ranked_as_forgotten_and_so_is_what_is_left_of_it() -> None:
    class Costly(Kept):
        def rank(self, runs: PageRuns, now: float) -> Ranking:
            values, no = runs.order.astype(np.float64), np.zeros(len(runs.order), np.bool_)
            return Ranking(values, runs.order < 3, no, no, values + 10.0 * (runs.order < 3))

    costly = Costly()
    candidates = costly.candidates
    first, second, third = (costly.add(number, 2) for number in (1, 2, 3))
    place = candidates.first_place if candidates.first(0.0) is first else None
    assert place is not None
    assert place.moves
    assert place.forgotten == 11.0
    candidates.discard(first)
    rest = costly.add(1, 1)
    candidates.keep_place(rest, place)
    for node in (rest, second):
        assert candidates.first(0.0) is node
        candidates.cannot_move(node)
    assert candidates.first(0.0) is third
    assert not candidates.first_place.moves
    candidates.discard(third)
    assert candidates.first(0.0) is rest
    assert (candidates.first_place.value, candidates.first_place.moves) == (11.0, False)
    candidates.begin()
    assert candidates.first(0.0) is rest
    assert candidates.first_place.moves, "the next step has a budget of its own"


def test_what_only_the_host_has_behind_a_run_is_told() -> None:
    kept = Kept()
    node = kept.add(1, 2)
    for number, count in ((2, 3), (3, 4)):
        part = Node(number, node, bytes([number] * PAGE_BYTES * count), count, PAGE_BYTES, 0.0)
        part.on_device = False
        node.children[part.key] = part
    kept.candidates.add(node)
    kept.candidates.first(0.0)
    assert kept.seen[-1].num_behind.tolist() == [7 * 4]


def test_of_several_waits_the_earliest_return_counts() -> None:
    def wait(seq: int, kind: str, since_s: float, expected_s: float | None = None) -> Wait:
        return Wait(seq, "a", kind, since_s, is_open=True, expected_s=expected_s)

    def told(*waits: Wait) -> tuple[str, float, float, float]:
        kept = Kept()
        node = kept.add(1, 2)
        node.waits = {each.seq: each for each in waits}
        kept.candidates.add(node)
        kept.candidates.first(0.0)
        runs = kept.seen[-1]
        assert runs.sooner_s is not None
        return runs.kinds[runs.kind[0]], runs.since_s[0], runs.expected_s[0], runs.sooner_s[0]

    sleep, person = wait(1, "sleep", 10.0, 11.0), wait(2, "people", 10.5, 310.0)
    for pair in ((sleep, person), (person, sleep)):
        assert told(*pair) == pytest.approx(("sleep", 10.0, 11.0, np.nan), nan_ok=True)
    tool, older = wait(3, "tool", 9.0), wait(4, "shell", 5.0)
    assert told(older, person, tool, sleep) == pytest.approx(("tool", 9.0, np.nan, 11.0), nan_ok=True)


def test_copies_are_made_in_the_order_of_giving_up() -> None:
    class Some(Kept):
        def rank(self, runs: PageRuns, now: float) -> Ranking:
            order = runs.order.astype(np.float64)
            no = np.zeros(len(order), np.bool_)
            values = np.where(order == 3, np.inf, -order)
            return Ranking(values, order != 5, no, no, values)

    some = Some()
    nodes = [some.add(number, 1) for number in range(7)]
    nodes[4].copies = [0]
    some.candidates.add(nodes[4])
    assert some.candidates.worth_copies(100, 0.0) == [nodes[6], nodes[2], nodes[1], nodes[0]]
    assert some.candidates.worth_copies(3, 0.0) == [nodes[6]], "of the next three, one is not worth it, and one has it"
