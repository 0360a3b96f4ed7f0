"""The time still to come: conditioned on the time waited, from whose samples, and when from none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sched.policies.snapshots import make_runs
from weft.sched.policies.estimators import (
    LASTED_ENOUGH,
    ElapsedEstimator,
    LearnedEstimator,
    OracleEstimator,
    WaitEstimator,
)
from weft.sched.policies.wait_samples import ENOUGH, MAX_SAMPLES, WIDTH

NOW = 1000.0


def learned(waits: dict[tuple[str, str], list[float]]) -> LearnedEstimator:
    estimator = LearnedEstimator()
    for (tenant, kind), seconds in waits.items():
        for wait_s in seconds:
            estimator.observe(tenant, kind, wait_s)
    return estimator


def remaining(estimator: WaitEstimator, waited_s: list[float], kind: int = 1) -> list[float]:
    runs = make_runs(len(waited_s), since_s=NOW - np.array(waited_s), kind=kind)
    return estimator.remaining_s(runs, NOW).tolist()


def test_elapsed_is_as_long_again_whatever_is_announced() -> None:
    runs = make_runs(3, since_s=[NOW - 4, NOW, NOW + 2], expected_s=[NOW + 50, np.nan, np.nan])
    assert ElapsedEstimator().remaining_s(runs, NOW).tolist() == [4, 0, 0]


def test_the_oracle_knows_what_is_announced() -> None:
    runs = make_runs(3, since_s=NOW - 4, expected_s=[NOW + 50, NOW - 1, np.nan])
    assert OracleEstimator().remaining_s(runs, NOW).tolist() == [50, 0, 4]


@pytest.mark.parametrize("estimator", [OracleEstimator(), learned({("t", "tool"): [10.0] * 30})])
def test_a_run_is_needed_at_the_earliest_of_several_returns(estimator: WaitEstimator) -> None:
    runs = make_runs(4, since_s=NOW - 5, sooner_s=[NOW + 1, NOW + 50, NOW - 1, np.nan])
    assert estimator.remaining_s(runs, NOW).tolist() == [1, 5, 5, 5]
    assert estimator.remaining_s(runs._replace(sooner_s=None), NOW).tolist() == [5] * 4


def test_an_announcement_of_another_that_waits_is_known_too() -> None:
    runs = make_runs(3, since_s=NOW - 5, sooner_s=[NOW + 1, NOW - 1, np.nan])
    assert LearnedEstimator().is_known(runs, NOW).tolist() == [True, False, False]
    low, high = LearnedEstimator().interval_s(runs, NOW, 0.8)
    assert (low.tolist(), high.tolist()) == ([0, 0, 0], [1, np.inf, np.inf])


def test_an_announced_return_in_the_future_is_believed() -> None:
    estimator = learned({("t", "tool"): [10.0] * 30})
    runs = make_runs(3, since_s=NOW - 4, expected_s=[NOW + 50, NOW - 1, np.nan])
    assert estimator.remaining_s(runs, NOW).tolist() == [50, 6, 6]
    low, high = estimator.interval_s(runs, NOW, 0.8)
    assert low.tolist() == high.tolist() == [50, 6, 6]


def test_only_waits_that_lasted_as_long_count() -> None:
    # 99 waits of 1 to 99 s. Of those that lasted w or more, the median is (w + 99) / 2.
    estimator = learned({("t", "tool"): [float(seconds) for seconds in range(99, 0, -1)]})
    waited = [0.0, 1.0, 1.5, 50.0, 89.0]
    assert remaining(estimator, waited) == [50, 49, (2 + 99) / 2 - 1.5, 24.5, 5]


def test_beyond_what_was_seen_it_is_as_elapsed() -> None:
    estimator = learned({("t", "tool"): [float(seconds) for seconds in range(1, 100)]})
    enough, few = 100.0 - LASTED_ENOUGH, 101.0 - LASTED_ENOUGH
    assert remaining(estimator, [enough, few, 500.0]) == [2, few, 500]


def test_quantiles_by_hand() -> None:
    # m = 24 samples of 1 to 24 s; order statistics at part * 25: 0.1 -> 2.5, 0.9 -> 22.5, 0.02 -> 0.5: the first.
    estimator = learned({("t", "tool"): [float(seconds) for seconds in range(1, 25)]})
    runs = make_runs(since_s=NOW)
    for coverage, bounds in ((0.8, (2.5, 22.5)), (0.96, (1.0, 24.0))):
        low, high = estimator.interval_s(runs, NOW, coverage)
        assert (low.item(), high.item()) == pytest.approx(bounds)


def test_intervals_are_open_where_nothing_is_known() -> None:
    low, high = LearnedEstimator().interval_s(make_runs(2), NOW, 0.8)
    assert low.tolist() == [0, 0]
    assert high.tolist() == [np.inf, np.inf]


class TestWhoseSamples:
    kinds = ("prefix", "shell", "web")
    tenants = ("one", "two")

    def ask(self, estimator: LearnedEstimator, *, tenants: tuple[str, ...] = tenants) -> list[float]:
        """Of tenants one and two for shell, then for web, all of which have waited for 3 s."""
        runs = make_runs(4, since_s=NOW - 3, kind=[1, 1, 2, 2], tenant=[0, 1] * 2, kinds=self.kinds, tenants=tenants)
        return estimator.remaining_s(runs, NOW).tolist()

    def test_nothing_is_known_before_enough_waits(self) -> None:
        estimator = learned({("one", "shell"): [13.0] * (ENOUGH - 1)})
        assert self.ask(estimator) == [3, 3, 3, 3]
        estimator.observe("one", "shell", 13.0)
        assert self.ask(estimator) == [10, 10, 3, 3]

    def test_a_tenants_own_come_first(self) -> None:
        waits = {("one", "shell"): [13.0] * ENOUGH, ("two", "shell"): [23.0] * 40, ("two", "web"): [33.0] * ENOUGH}
        estimator = learned(waits)
        assert self.ask(estimator) == [10, 20, 30, 30]
        assert self.ask(estimator, tenants=("two", "one")) == [20, 10, 30, 30]

    def test_a_tenant_of_few_waits_learns_from_all(self) -> None:
        estimator = learned({("one", "shell"): [13.0] * (ENOUGH - 1), ("two", "shell"): [23.0] * 40})
        assert self.ask(estimator) == [20, 20, 3, 3]

    def test_tenants_that_are_not_told_apart_use_all(self) -> None:
        estimator = learned({("one", "shell"): [13.0] * 60, ("two", "shell"): [23.0] * 40})
        assert self.ask(estimator, tenants=()) == [10, 10, 3, 3]

    def test_a_prefix_is_a_kind_of_its_own(self) -> None:
        estimator = learned({("one", "prefix"): [13.0] * ENOUGH})
        assert remaining(estimator, [3.0], kind=0) == [10]
        assert remaining(estimator, [3.0], kind=1) == [3]


class TestMemory:
    def test_the_last_waits_count(self) -> None:
        estimator = learned({("t", "tool"): [100.0] * (3 * MAX_SAMPLES) + [10.0] * (MAX_SAMPLES // 2 + 1)})
        assert remaining(estimator, [0.0]) == [10]
        assert remaining(estimator, [10.5]) == [89.5]
        for _ in range(MAX_SAMPLES):
            estimator.observe("t", "tool", 5.0)
        assert remaining(estimator, [0.0, 5.5]) == [5, 5.5]

    def test_waits_that_are_no_times_are_left_out(self) -> None:
        estimator = learned({("t", "tool"): [7.0] * ENOUGH + [np.nan, -1.0, np.inf] * 50})
        assert remaining(estimator, [0.0]) == [7]

    def test_every_group_and_every_sample_can_be_the_last(self) -> None:
        """Positions in the table: a full group in its last slot, of which nothing lasted as long."""
        estimator = LearnedEstimator()
        samples = estimator._samples
        number = 0
        while samples._num_slots < len(samples.is_own) or number < 5:
            number += 1
            for _ in range(MAX_SAMPLES):
                estimator.observe("t", f"k{number}", float(number))
        assert samples.ended_s.shape == (samples._num_slots, WIDTH)
        kinds = ("prefix", *(f"k{index}" for index in range(1, number + 1)))
        for waited_s, expected in ((0.0, list(range(1, number + 1))), (1000.0, [1000] * number)):
            kind = np.arange(1, number + 1)
            runs = make_runs(number, since_s=NOW - waited_s, kind=kind, kinds=kinds, tenants=("t",))
            assert estimator.remaining_s(runs, NOW).tolist() == expected
