"""`min_waste`: the price of room orders runs, and what shares, weights and copies change about it."""

from __future__ import annotations

import gc
import sys
from math import nan
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.sched.policies.snapshots import line, make_runs
from weft.cache.runs import PREFIX, UNUSED, PageRuns
from weft.core.waits import WaitKind
from weft.sched.policies import NEVER, InterceptPolicy, Load, make_policy
from weft.sched.policies.min_waste import BOOKKEEPING_S, KEPT_S, SOONEST_S, SPARED_FROM
from weft.sched.policies.registry import POLICIES
from weft.sched.policies.wait_samples import ENOUGH
from weft.sched.policies.waste import RunSizes, swap_waste

NOW = 1000.0
LOAD = Load(NOW, running_tokens=5000, running_rows=24, saturation_tokens=64, costs=line(page_s=0.002))
WHOLE_WASTE = 812.8
"""Token-seconds to recompute 160 tokens under `LOAD`, worked in `test_waste`."""


def ranks(runs: PageRuns, load: Load = LOAD, estimator: str = "oracle") -> list[float]:
    return make_policy("min_waste", estimator).rank(runs, load).tolist()


def context(count: int = 1, **columns: Any) -> PageRuns:
    """Whole contexts of 160 tokens in ten pages."""
    return make_runs(count, **{"num_tokens": 160, "num_pages": 10} | columns)


def test_the_ratio_by_hand() -> None:
    # Waste of giving up 812.8; of preserving 160 tokens for 2 s 320, for 10 s 1,600.
    runs = context(2, expected_s=[NOW + 2, NOW + 10])
    assert ranks(runs) == pytest.approx([WHOLE_WASTE / 320, WHOLE_WASTE / 1600], rel=1e-5)


def test_kv_is_needed_once_its_return_has_waited_for_the_device() -> None:
    tenants = ("busy", "idle")
    runs = context(3, expected_s=[NOW + 2, NOW - 1, NOW + 2], tenant=[0, 0, 1], tenants=tenants)
    busy = LOAD._replace(queued_s={"busy": 3.0})
    assert ranks(runs, busy) == pytest.approx([WHOLE_WASTE / 800, WHOLE_WASTE / 480, WHOLE_WASTE / 320], rel=1e-5)
    runs = context(kind=2, kinds=(PREFIX, UNUSED, WaitKind.QUEUE), tenants=tenants)
    assert ranks(runs, busy) == ranks(runs), "it waits for the device already"


@pytest.mark.parametrize(("wait_s", "discards"), [(0.5, False), (5.0, False), (5.2, True), (60.0, True)])
def test_a_ratio_below_one_is_the_papers_decision_to_discard(wait_s: float, discards: bool) -> None:
    # Equation 5: preserving 160 tokens for w seconds wastes 160 w, recomputing them 812.8: equal at w = 5.08.
    assert (ranks(context(expected_s=NOW + wait_s))[0] < 1) == discards


SPARED = {"expected_s": NOW + 5.0 / SPARED_FROM, "kind": 2, "kinds": (PREFIX, UNUSED, "tool")}
"""Worth more than what a newcomer gains by it."""


def spared(load: Load = LOAD, **columns: Any) -> bool:
    [found] = make_policy("min_waste", "oracle").spares(context(**SPARED | columns), load).tolist()
    return bool(found)


def test_newcomers_wait_for_what_is_worth_more_to_its_session() -> None:
    assert spared()
    later = NOW + 5.2 / SPARED_FROM  # a ratio of 1 is at 5.08 s
    assert not spared(expected_s=later)
    assert spared(expected_s=later, weight=1.0)
    assert not spared(kind=0), "nothing waits for it"
    assert not spared(kind=1)
    assert not spared(over_share=True)
    assert not spared(LOAD._replace(costs=None)), "a ratio of what was not measured"


def test_newcomers_wait_for_no_return_of_which_little_is_known() -> None:
    policy, runs = make_policy("min_waste", "learned"), context(since_s=NOW - 1, **SPARED | {"expected_s": nan})
    for count in range(ENOUGH):
        assert not policy.spares(runs, LOAD)[0], count
        policy.observe("", "tool", 2.0 / SPARED_FROM)
    assert policy.spares(runs, LOAD)[0]
    assert not make_policy("min_waste", "elapsed").spares(context(**SPARED), LOAD)[0]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "min_waste"])
def test_of_other_policies_those_that_preserve_spare(name: str) -> None:
    policy = make_policy(name)
    assert policy.preserves is (name in ("preserve", "heuristic", "budgeted_heuristic"))
    assert policy.spares(context(**SPARED), LOAD)[0] == policy.preserves


def test_explicit_pages_weigh_what_a_swap_wastes() -> None:
    policy = make_policy("min_waste", "oracle")
    runs = context(2, expected_s=NOW + 10, explicit=[False, True])
    slow_link = LOAD._replace(costs=line(page_s=1.0), host_pages=100)
    plain, explicit = policy.rank(runs, slow_link).tolist()
    assert plain == pytest.approx(WHOLE_WASTE / 1600, rel=1e-5)
    assert explicit == pytest.approx(swap_waste(runs, RunSizes.of(runs, slow_link), slow_link)[1] / 1600, rel=1e-5)
    assert explicit > plain
    assert policy.moves(runs, slow_link).tolist() == [False, True]
    assert policy.rank(runs, LOAD)[1] == NEVER, "there is no host"


def test_a_price_and_not_a_size_decides() -> None:
    # Ten contexts of 160 tokens for 30 s, and one of 1,600 for 20 s. The large one saves more in all
    # (20 * 1,600 - waste), but less per token-second, so small ones go first.
    tokens, waits = [160] * 10 + [1600], [30.0] * 10 + [20.0]
    load = LOAD._replace(running_tokens=20_000)
    runs = make_runs(11, num_tokens=tokens, num_pages=[t // 16 for t in tokens], expected_s=NOW + np.array(waits))
    rank = make_policy("min_waste", "oracle").rank(runs, load)
    assert rank.argmax() == 10


def test_the_longest_wait_goes_first_of_equals_in_all_else() -> None:
    runs = context(4, since_s=[NOW - 1, NOW - 50, NOW - 7, NOW])
    rank = ranks(runs, estimator="elapsed")
    assert np.argsort(rank).tolist() == [1, 2, 0, 3]
    assert rank[3] == pytest.approx(WHOLE_WASTE / (160 * SOONEST_S)), "finite: it can go when nothing else can"


def test_a_prefix_is_as_old_as_its_last_use_or_as_learned() -> None:
    policy = make_policy()
    runs = context(2, kind=[0, 1], since_s=[NOW - 20, NOW - 10])
    assert policy.rank(runs, LOAD)[0] < policy.rank(runs, LOAD)[1]
    for _ in range(30):
        policy.observe("t", "prefix", 21.0)
    assert policy.rank(runs, LOAD)[0] > policy.rank(runs, LOAD)[1], "in use again in a second"


def test_those_over_their_share_go_first_in_the_same_order() -> None:
    waits = NOW + np.array([40.0, 2.0, 10.0, 0.5])
    rank = ranks(context(4, expected_s=waits, over_share=[False, True, True, False])._replace(is_shared=True))
    assert np.argsort(rank).tolist() == [2, 1, 0, 3]
    assert np.argsort(ranks(context(4, expected_s=waits))).tolist() == [0, 2, 1, 3], "one tenant has no share"


def test_what_a_tenant_will_hardly_miss_goes_before_what_is_kept_for_its_share() -> None:
    policy = make_policy()
    kinds = ("prefix", "unused", "tool", "chat")
    runs = context(
        7,
        kinds=kinds,
        tenants=("quiet", "loud"),
        kind=[0, 1, 2, 2, 3, 2, 2],
        since_s=NOW - np.array([1.0, 2.0, 3.0, KEPT_S + 1, 5.0, KEPT_S + 6, 7.0]),
        weight=[0, 0, 0, 0, 0, 1, 0],
        over_share=[False] * 6 + [True],
    )._replace(is_shared=True)
    for _ in range(30):
        policy.observe("quiet", "chat", KEPT_S, ended=False)
        policy.observe("loud", "tool", KEPT_S, ended=False)
    kept = policy.kept(runs, LOAD)
    assert kept.tolist() == [True, False, True, False, False, True, False]
    order = np.argsort(policy.rank(runs, LOAD)).tolist()
    assert order[0] == 6
    assert set(order[1:4]) == {1, 3, 4}
    assert not policy.kept(runs._replace(is_shared=False), LOAD).any()


def test_weight_keeps_longer_and_a_pin_keeps() -> None:
    one, weighted, pinned, over = ranks(
        context(4, expected_s=NOW + 10, weight=[0, 3, np.inf, np.inf], over_share=[False, False, False, True])
    )
    assert weighted == pytest.approx(4 * one)
    assert pinned == over == NEVER
    flooding = ranks(context(2, expected_s=NOW + 10, weight=[0, 3], over_share=True)._replace(is_shared=True))
    assert flooding[0] < flooding[1] < 0


class TestHost:
    runs = context(3, expected_s=NOW + 10, has_copy=[True, False, False], num_pages=[10, 10, 9])

    def test_a_copy_makes_giving_up_cheaper(self) -> None:
        # In alone, 101.6 token-seconds, worked in `test_waste`; there is no room for other copies.
        with_copy, without, _ = ranks(self.runs)
        assert with_copy == pytest.approx(101.6 / 1600, rel=1e-4)
        assert without == pytest.approx(WHOLE_WASTE / 1600, rel=1e-4)

    def test_room_on_the_host_counts_where_the_run_fits(self) -> None:
        # Out and in, 201.6 for the ten pages of the second run, once there is room for ten.
        assert ranks(self.runs, LOAD._replace(host_pages=10))[1] == pytest.approx(201.6 / 1600, rel=1e-4)
        assert ranks(self.runs, LOAD._replace(host_pages=9))[1] == pytest.approx(WHOLE_WASTE / 1600, rel=1e-4)

    def test_a_link_slower_than_recomputing_is_not_used(self) -> None:
        load = LOAD._replace(costs=line(page_s=1.0), host_pages=10)
        assert ranks(self.runs, load)[:2] == pytest.approx([WHOLE_WASTE / 1600] * 2, rel=1e-4)
        assert make_policy().moves(self.runs, load).tolist() == [False] * 3

    def test_where_a_step_cannot_move_it_the_copy_alone_makes_no_difference(self) -> None:
        load = LOAD._replace(host_pages=10)
        policy = make_policy("min_waste", "oracle")
        assert policy.rank(self.runs, load, may_move=False)[:2] == pytest.approx([WHOLE_WASTE / 1600] * 2, rel=1e-4)

    def test_what_only_the_host_has_behind_a_run_is_lost_with_it(self) -> None:
        """Ten pages with ten behind them are forgotten like twenty, and hold only ten."""
        load = LOAD._replace(host_pages=100)
        both, whole = context(num_behind=160), make_runs(num_tokens=320, num_pages=20, expected_s=NOW + 10)
        policy = make_policy("min_waste", "oracle")
        lost = policy.rank(both._replace(expected_s=whole.expected_s), load, may_move=False)
        assert lost == pytest.approx(2 * policy.rank(whole, load, may_move=False), rel=1e-3)
        assert policy.rank(both, load) == pytest.approx(policy.rank(context(), load)), "moved, it loses nothing"

    def test_what_costs_nothing_to_give_up_goes_by_the_longest_wait(self) -> None:
        runs = context(3, expected_s=NOW + np.array([5.0, 50.0, 20.0]), has_copy=True)
        rank = ranks(runs, LOAD._replace(costs=None))
        assert rank == pytest.approx([BOOKKEEPING_S / 5, BOOKKEEPING_S / 50, BOOKKEEPING_S / 20])


def test_one_snapshot_is_assessed_once_until_a_wait_ends() -> None:
    policy = make_policy()
    runs = context(since_s=NOW - 1)
    before = policy.rank(runs, LOAD)
    for _ in range(30):
        policy.observe("t", "tool", 100.0)
    after = policy.rank(runs, LOAD)
    assert after[0] == pytest.approx(before[0] / 99, rel=1e-3)
    later = policy.rank(runs, LOAD._replace(now=NOW + 49))
    assert later[0] == pytest.approx(before[0] / 50, rel=1e-3)


def mixed(count: int) -> PageRuns:
    generator = np.random.default_rng(0)
    pages = generator.integers(1, 200, count)
    return make_runs(
        count,
        kinds=("prefix", *(f"k{index}" for index in range(12))),
        tenants=tuple(f"t{index}" for index in range(8)),
        kind=generator.integers(0, 13, count),
        tenant=generator.integers(0, 8, count),
        num_pages=pages,
        num_tokens=16 * pages + generator.integers(0, 1000, count),
        since_s=generator.uniform(NOW - 80, NOW, count),
        has_copy=generator.random(count) < 0.3,
        over_share=generator.random(count) < 0.1,
        weight=generator.integers(0, 2, count),
    )


@pytest.mark.parametrize("name", ["lru", "preserve", "heuristic", "min_waste"])
def test_deciding_takes_as_many_calls_for_2000_runs_as_for_200(name: str) -> None:
    policy = make_policy(name)
    for number in range(2000):
        policy.observe(f"t{number % 8}", f"k{number % 12}", number / 20)
    load = LOAD._replace(host_pages=5000)
    assert calls(policy, mixed(200), load) == calls(policy, mixed(2000), load)


def calls(policy: InterceptPolicy, runs: PageRuns, load: Load) -> int:
    """Calls of functions, of Python and of C, while a policy ranks."""
    policy.rank(runs._replace(), load)
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # callbacks and finalizers of other tests' objects do not belong here
    sys.setprofile(note)
    try:
        policy.rank(runs, load)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_the_same_inputs_give_the_same_decisions() -> None:
    found = []
    for _ in range(2):
        policy = make_policy()
        for number in range(500):
            policy.observe(f"t{number % 8}", f"k{number % 12}", number / 20)
        found.append(policy.rank(mixed(500), LOAD).tobytes())
    assert found[0] == found[1]


class TestRunsOfNoMoreUse:
    """Kinds of which most runs were given up before anything used them."""

    def policy(self, ended: int, given_up: int) -> InterceptPolicy:
        policy = make_policy("min_waste", "learned")
        for _ in range(ended):
            policy.observe("t", "tool", 100.0)
        for _ in range(given_up):
            policy.observe("t", "tool", 150.0, ended=False)
        return policy

    def test_the_waste_counts_times_the_chance_of_a_return(self) -> None:
        runs = context(since_s=NOW - 1)
        certain, unlikely = (self.policy(*counts).rank(runs, LOAD)[0] for counts in ((40, 0), (10, 30)))
        assert unlikely == pytest.approx(certain / 4, rel=1e-3)

    @pytest.mark.parametrize("has_copy", [True, False])
    def test_a_run_that_hardly_returns_is_hardly_brought_back_either(self, has_copy: bool) -> None:
        """So it is worth a copy as long as making one holds nothing up."""
        load, runs = LOAD._replace(host_pages=100, swap_hidden=1.0), context(since_s=NOW - 1, has_copy=has_copy)
        certain, unlikely = (self.policy(*counts) for counts in ((40, 0), (10, 30)))
        assert unlikely.moves(runs, load).all()
        assert unlikely.rank(runs, load) == pytest.approx(certain.rank(runs, load) / 4, rel=1e-3)

    def test_where_recomputing_costs_nothing_the_chance_still_decides(self) -> None:
        load = LOAD._replace(costs=line(per_token_s=0.0, base_s=0.0))
        runs = context(since_s=NOW - 1)
        certain, unlikely = (self.policy(*counts).rank(runs, load)[0] for counts in ((40, 0), (10, 30)))
        assert unlikely == pytest.approx(certain / 4, rel=1e-3)

    def test_what_is_never_used_goes_before_all_else_and_gets_no_copy(self) -> None:
        policy = self.policy(0, 40)
        runs = context(2, kinds=("prefix", "tool", "other"), kind=[1, 2], since_s=[NOW - 1, NOW - 300])
        load = LOAD._replace(host_pages=100)
        rank = policy.rank(runs, load)
        assert rank[0] < rank[1], "although the other waits for longer"
        assert policy.moves(runs, load).tolist() == [False, True]

    def test_a_few_that_ended_late_do_not_say_that_all_end(self) -> None:
        """Most turns of a client that went away go on for ever; here some came back after the longest time known."""
        policy = make_policy("min_waste", "learned")
        for number in range(60):
            policy.observe("t", "tool", 100.0 if number < 20 else 50.0, ended=number < 20)
        runs = context(since_s=NOW - 1)
        assert policy.rank(runs, LOAD) == pytest.approx(self.policy(20, 0).rank(runs, LOAD) / 3, rel=1e-3)

    @pytest.mark.parametrize("kind", [UNUSED, "tool"])
    def test_what_is_older_than_all_before_is_not_more_likely_to_be_used(self, kind: str) -> None:
        policy = make_policy("min_waste", "learned")
        for number in range(40):
            policy.observe("t", kind, float(number), ended=number < 30)
        runs = context(4, kinds=(PREFIX, kind), kind=1, since_s=NOW - np.array([1, 34, 60, 600]))
        rank = policy.rank(runs, LOAD)
        assert (np.diff(rank) < 0).all()
        assert rank[0] > 1e3 * rank[1]

    def test_of_a_few_nothing_is_concluded(self) -> None:
        assert self.policy(0, 3).moves(context(since_s=NOW - 1), LOAD._replace(host_pages=100)).all()

    def test_what_is_announced_is_all_that_an_oracle_expects(self) -> None:
        policy = make_policy("min_waste", "oracle")
        runs = context(3, kinds=("prefix", "unused"), kind=[1, 1, 0], since_s=NOW - 1, expected_s=[NOW + 5, nan, nan])
        assert policy.moves(runs, LOAD._replace(host_pages=100)).tolist() == [True, False, True]


def test_sequences_that_wait_for_the_device_stay_the_first_that_came_the_longest() -> None:
    runs = context(3, kinds=("prefix", "tool", "queue"), kind=[2, 1, 2], since_s=[NOW - 50, NOW - 1, NOW - 2])
    assert np.argsort(make_policy().rank(runs, LOAD)).tolist() == [1, 2, 0]
