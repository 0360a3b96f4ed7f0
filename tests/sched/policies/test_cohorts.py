"""Cohorts: sessions that begin alike tell which waits end, apart from the other waits of their kind."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sched.policies.snapshots import make_runs
from weft.core.ids import pack_tokens
from weft.core.waits import COHORT_TOKENS, label_of, of_cohort, without_cohort
from weft.sched.policies import make_policy
from weft.sched.policies.estimators import LearnedEstimator
from weft.sched.policies.wait_samples import COHORTS_PER_TENANT, ENOUGH, MAX_GROUPS, WaitSamples

ONCE = of_cohort("chat", pack_tokens([1] * COHORT_TOKENS))
"""A cohort of which nobody answers."""


def told(*, once: int, others: int, answered: int) -> LearnedEstimator:
    """So many waits of the cohort, none of which ends, and others, each of a session of its own, of which some end."""
    estimator = LearnedEstimator()
    for number in range(max(once, others)):
        if number < once:
            estimator.observe("t", ONCE, 50.0, ended=False)
        if number < others:
            kind = of_cohort("chat", pack_tokens([number + 2] * COHORT_TOKENS))
            estimator.observe("t", kind, 60.0, ended=number < answered)
    return estimator


def chances(estimator: LearnedEstimator, *kinds: str) -> list[float]:
    columns = {"kind": np.arange(len(kinds)) + 1, "since_s": 0.0}
    runs = make_runs(len(kinds), kinds=("prefix", *kinds), tenants=("t",), **columns)
    return estimator.return_chance(runs, 1.0).tolist()


def test_a_cohort_is_of_the_first_tokens_and_of_long_prompts_alone() -> None:
    tokens = list(range(COHORT_TOKENS))
    found = of_cohort("tools:read", pack_tokens(tokens))
    assert found == of_cohort("tools:read", pack_tokens(tokens))
    assert found != of_cohort("tools:read", pack_tokens([*tokens[:-1], 7]))
    assert of_cohort("chat", pack_tokens(tokens[:-1])) == ""
    assert (without_cohort(found), label_of(found)) == ("tools:read", "tools")
    assert (without_cohort("chat"), label_of(ONCE)) == ("chat", "chat")


def test_a_cohort_of_enough_waits_is_estimated_by_itself_and_the_others_without_it() -> None:
    estimator = told(once=127 + 2 * ENOUGH, others=100, answered=100)
    assert estimator.group("t", ONCE) == ONCE
    assert estimator.group("t", of_cohort("chat", pack_tokens([3] * COHORT_TOKENS))) == "chat"
    cohort, others = chances(estimator, ONCE, "chat")
    assert cohort == 0
    assert others >= 0.8, "but for those that came before the cohort was known"


def test_a_cohort_of_few_waits_counts_among_the_others() -> None:
    estimator = told(once=ENOUGH - 1, others=ENOUGH, answered=ENOUGH)
    assert estimator.group("t", ONCE) == "chat"
    [chance] = chances(estimator, "chat")
    assert chance == pytest.approx(ENOUGH / (2 * ENOUGH - 1))
    assert chances(estimator, ONCE, "chat") == [chance, chance]


def test_where_all_waits_end_there_are_no_cohorts() -> None:
    estimator = LearnedEstimator()
    for _ in range(2 * ENOUGH):
        estimator.observe("t", ONCE, 50.0)
    assert estimator.group("t", ONCE) == "chat"


def test_another_tenants_cohort_is_not_known() -> None:
    assert told(once=2 * ENOUGH, others=0, answered=0).group("other", ONCE) == "chat"


def test_the_wait_of_a_client_that_was_noted_before_its_cohort_was_known_ends_once() -> None:
    samples = WaitSamples()
    for number in range(ENOUGH + 5):
        samples.add("t", ONCE, 5.0, ended=False, since_s=float(number))
    assert samples.has_cohort("t", ONCE)
    samples.add("t", ONCE, 90.0, since_s=0.0)
    slots = samples.slots(("t",), ("chat", ONCE))[0]
    found = samples.lasted(slots, np.zeros(2))
    assert found.num_ended.tolist() == [1, 1]
    assert (found.num_ended + found.num_given_up).tolist() == [ENOUGH, ENOUGH + 5]


def test_sessions_that_all_begin_differently_push_no_kinds_out() -> None:
    samples = WaitSamples()
    for _ in range(ENOUGH):
        samples.add("t", "tool", 5.0)
    for number in range(4 * MAX_GROUPS):
        samples.add("t", of_cohort("chat", pack_tokens([number] * COHORT_TOKENS)), 1.0, ended=False)
        samples.add(f"t{number % 20}", of_cohort("chat", pack_tokens([number] * COHORT_TOKENS)), 1.0, ended=False)
    assert samples.slots(("t",), ("tool",)).item()
    assert all(len(kinds) <= COHORTS_PER_TENANT for kinds in samples._cohorts.values())
    assert samples._num_groups <= MAX_GROUPS


@pytest.mark.parametrize("estimator", ["elapsed", "oracle"])
def test_estimators_that_learn_nothing_have_no_cohorts(estimator: str) -> None:
    policy = make_policy("min_waste", estimator)  # type: ignore[arg-type]
    assert policy.estimator.group("t", ONCE) == "chat"  # type: ignore[attr-defined]
