"""What a policy sees of runs that could be given up, step after step, and how many of them are kept for shares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from weft.cache.candidates import FEW_TENANTS, MANY, ORDER_S, ORDERED, Candidates, RunPlace
from weft.cache.nodes import Node, Wait
from weft.cache.runs import PageRuns, Ranking, least_recently_used

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
    for step in range(3):
        kept.candidates.begin()
        kept.candidates.first(step * ORDER_S)
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


class Many(Kept):
    """Those of one tenant, first those with a small number, and so many that their order holds for `ORDER_S`."""

    def __init__(self, count: int = MANY + 1) -> None:
        super().__init__()
        self.candidates.shares.count_held = lambda: {"a": 30}
        self.nodes = {number: self.add(number, 1) for number in range(1, 1 + count)}

    def rank(self, runs: PageRuns, now: float) -> Ranking:
        self.seen.append(runs)
        values, no = runs.order.astype(np.float64), np.zeros(len(runs.order), np.bool_)
        return Ranking(values, ~no, no, no, values + 0.5)

    def first(self, now: float) -> int:
        """Number of the first candidate in a step that begins now."""
        self.candidates.begin()
        return self.now_first(now)

    def now_first(self, now: float) -> int:
        node = self.candidates.first(now)
        assert node is not None
        return node.node_id

    @property
    def num_ranked(self) -> list[int]:
        """Candidates that were ranked, each time."""
        return [len(runs.order) for runs in self.seen]


def test_the_order_of_many_holds_for_some_steps() -> None:
    many = Many(MANY + 3)
    assert [many.first(now) for now in (0.0, 0.1, 0.2)] == [1, 1, 1]
    assert many.num_ranked == [MANY + 3]
    many.candidates.discard(many.nodes[1])
    many.candidates.add(many.nodes[2])
    assert many.first(0.2) == 2
    assert many.num_ranked == [MANY + 3, 1], "what has changed alone"
    assert many.first(ORDER_S) == 2
    assert many.num_ranked[2:] == [MANY + 2]


def test_the_order_of_few_holds_for_a_part_of_that_time() -> None:
    few = Many(MANY // 2)
    assert [few.first(now * ORDER_S) for now in (0, 0.4, 0.6)] == [1, 1, 1]
    assert few.num_ranked == [MANY // 2] * 2


def test_the_order_of_many_is_made_anew_when_a_second_tenant_comes() -> None:
    many = Many()
    many.first(0.0)
    many.candidates.shares.count_held = lambda: {"a": 30, "b": 1}
    many.first(0.0)
    many.first(0.0)
    assert many.num_ranked == [MANY + 1] * 2


def test_the_order_of_many_is_made_anew_when_a_tenant_clearly_exceeds_its_share_or_keeps_within_it() -> None:
    many, held = Many(), {"a": 50, "b": 30}
    many.candidates.shares.count_held = lambda: held
    many.first(0.0)
    held["a"] = 51
    many.first(0.0)
    assert many.num_ranked == [MANY + 1], "of 100 pages each has 50, and 2 % of that are one"
    held["a"] = 52
    many.first(0.0)
    many.first(0.0)
    assert many.num_ranked == [MANY + 1] * 2
    held["a"] = 49
    many.first(0.0)
    assert many.num_ranked == [MANY + 1] * 2, "hardly within"
    held["a"] = 48
    many.first(0.0)
    many.first(0.0)
    assert many.num_ranked == [MANY + 1] * 3


def test_what_a_step_passes_over_or_cannot_move_has_its_place_again_in_the_next() -> None:
    many = Many()
    candidates, nodes = many.candidates, many.nodes
    many.first(0.0)
    candidates.skip(nodes[1])
    assert many.now_first(0.0) == 2
    candidates.cannot_move(nodes[2])
    assert many.now_first(0.0) == 2, "2.5 is before 3"
    assert not candidates.first_place.moves
    candidates.skip(nodes[2])
    assert many.now_first(0.0) == 3
    assert many.first(0.1) == 1
    candidates.discard(nodes[1])
    assert many.now_first(0.1) == 2
    assert candidates.first_place == RunPlace(2.0, True, False, False, 2.5, for_step=False)
    candidates.discard(nodes[2])
    assert many.now_first(0.1) == 3
    assert many.num_ranked == [MANY + 1]


def test_what_came_later_does_not_go_before_what_was_left_out_of_the_order() -> None:
    many = Many(2 * ORDERED)
    many.first(0.0)
    late = many.add(10 * ORDERED, 1)
    for number in range(1, 2 * ORDERED + 1):
        assert many.now_first(0.1) == number
        many.candidates.discard(many.nodes[number])
    assert many.candidates.first(0.1) is late
    assert many.num_ranked == [2 * ORDERED, 1, ORDERED + 1, 1]


def test_a_run_before_one_that_went_is_ranked_when_it_cannot_move() -> None:
    many = Many()
    many.first(0.0)
    place = many.candidates.first_place._replace(forgotten=np.nan)
    many.candidates.discard(many.nodes[1])
    before = many.add(1, 1)
    many.candidates.keep_place(before, place)
    assert many.now_first(0.0) == 1
    assert many.num_ranked == [MANY + 1]
    many.candidates.cannot_move(before)
    assert many.now_first(0.0) == 1
    assert many.num_ranked == [MANY + 1, 1]
    assert many.candidates.first_place.forgotten == 1.5
    many.candidates.cannot_move(before)
    assert many.now_first(0.0) == 1
    many.candidates.skip(before)
    assert many.now_first(0.0) == 2


def test_a_run_that_gets_a_copy_keeps_its_place() -> None:
    many = Many()
    many.first(0.0)
    assert many.candidates.worth_copies(2, 0.0) == [many.nodes[1], many.nodes[2]]
    many.candidates.got_copy(many.nodes[1])
    assert many.candidates.worth_copies(2, 0.0) == [many.nodes[2]]
    assert many.num_ranked == [MANY + 1]


def test_tenants_that_no_candidate_has_are_forgotten() -> None:
    seen: list[PageRuns] = []

    def rank(runs: PageRuns, now: float) -> Ranking:
        seen.append(runs)
        return least_recently_used(runs, now)

    candidates = Candidates(rank, 4, 1000)
    roots = [Node(0, None, b"", 0, PAGE_BYTES, 0.0, owner=f"tenant {number}") for number in range(10 * FEW_TENANTS)]
    staying: list[Node] = []
    for number, root in enumerate(roots):
        node = Node(number, root, bytes(PAGE_BYTES), 1, PAGE_BYTES, float(number))
        candidates.add(node)
        if number % FEW_TENANTS == 1 or root is roots[-1]:
            staying.append(node)
        else:
            candidates.discard(node)
    assert candidates.first(0.0) is staying[0]
    runs = seen[-1]
    assert len(runs.tenants) <= FEW_TENANTS + 1
    by_order = dict(zip(runs.order.tolist(), runs.tenant.tolist(), strict=True))
    assert {node.node_id: runs.tenants[by_order[node.node_id]] for node in staying} == {
        node.node_id: node.owner for node in staying
    }
