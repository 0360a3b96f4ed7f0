"""The policies that estimate nothing: what they do at the start, in which order runs go, and what never goes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sched.policies.snapshots import line, make_runs
from weft.abi.errors import InvalidRequest
from weft.sched.policies import ESTIMATORS, NEVER, POLICIES, Load, make_policy
from weft.sched.policies.heuristic import HeuristicPolicy

KINDS = ("prefix", "unused", "chat", "image", "shell")
RUNS = make_runs(
    5,
    kinds=KINDS,
    kind=[0, 2, 3, 4, 4],
    since_s=[50, 40, 30, 20, 10],
    weight=[0, 0, 0, 0, np.inf],
    over_share=[0, 1] * 2 + [0],
)
LOAD = Load(100.0, host_pages=10, costs=line(page_s=0.001))
NAMES = list(POLICIES)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("lru", [50, 40, 30, 20, NEVER]),
        ("discard", [50, 40, 30, 20, NEVER]),
        ("improved_discard", [50, 40, 30, 20, NEVER]),
        ("swap", [50, 40, 30, 20, NEVER]),
        ("preserve", [50, NEVER, NEVER, NEVER, NEVER]),
        ("heuristic", [50, 40, 30, NEVER, NEVER]),
    ],
)
def test_runs_go_by_last_use_unless_they_stay(name: str, ranks: list[float]) -> None:
    assert make_policy(name).rank(RUNS, LOAD).tolist() == ranks


@pytest.mark.parametrize(
    ("name", "starts", "keeps_rank", "uses_index"),
    [
        ("lru", ["keep"] * 3, True, True),
        ("discard", ["discard"] * 3, False, False),
        ("improved_discard", ["discard"] * 3, True, False),
        ("preserve", ["keep"] * 3, True, True),
        ("swap", ["swap"] * 3, True, True),
        ("heuristic", ["discard", "discard", "keep"], True, True),
        ("min_waste", ["keep"] * 3, True, True),
    ],
)
def test_what_happens_at_the_start_and_at_the_return(
    name: str, starts: list[str], keeps_rank: bool, uses_index: bool
) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert [policy.at_start(kind) for kind in KINDS[2:]] == starts
    assert policy.acts_at_start is (starts != ["keep"] * 3)
    assert (policy.keeps_rank, policy.uses_index) == (keeps_rank, uses_index)


@pytest.mark.parametrize("name", NAMES)
def test_a_pin_never_goes(name: str) -> None:
    policy = make_policy(name)
    for over in (False, True):
        runs = make_runs(3, kind=[0, 0, 1], over_share=over, weight=[0, np.inf, np.inf], kinds=KINDS)
        rank = policy.rank(runs, LOAD)
        assert rank[0] < NEVER
        assert (rank[1:] == NEVER).all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_rank_is_ranked(name: str) -> None:
    policy = make_policy(name)
    runs = make_runs(0)
    assert len(policy.rank(runs, LOAD)) == len(policy.moves(runs, LOAD)) == 0


def test_long_kinds_are_an_argument() -> None:
    policy = HeuristicPolicy({"shell"})
    assert [policy.at_start(kind) for kind in KINDS[2:]] == ["keep", "keep", "discard"]
    assert policy.rank(RUNS, LOAD).tolist() == [50, NEVER, NEVER, 20, NEVER]


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidRequest, match=r"min_wast'.*lru, discard, improved_discard, preserve, swap") as policy:
        make_policy("min_wast")
    assert policy.value.param == "policy"
    with pytest.raises(InvalidRequest, match=r"guess'.*elapsed, learned, oracle") as estimator:
        make_policy("lru", "guess")
    assert estimator.value.param == "estimator"


def test_policies_share_nothing_that_they_learn() -> None:
    one, other = make_policy(), make_policy()
    for _ in range(40):
        one.observe("t", "tool", 5.0)
    runs = make_runs(since_s=99.0)
    assert one.rank(runs, LOAD) != other.rank(runs, LOAD)


def test_every_estimator_has_its_name() -> None:
    assert {name: make().name for name, make in ESTIMATORS.items()} == {name: name for name in ESTIMATORS}
