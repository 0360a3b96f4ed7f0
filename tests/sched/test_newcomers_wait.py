"""Newcomers wait rather than have KV given up that is worth more than their start, and never for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sched.policies.snapshots import line
from tests.sched.stepping import Stepped
from weft.core import wire
from weft.core.cost.model import CostModel
from weft.sched.sequence import WARM, ReturnOrder

AGING_S = 0.2
WAITING, RUNNING, NEWCOMER = 1, 2, 3
COSTS = line(per_token_s=0.1)
"""To compute 100 tokens again takes 10 s, in which they and 50 others wait: as much waste as to keep them for 10 s."""


def crowded(
    *,
    expected_in_s: float = 5.0,
    costs: CostModel | None = COSTS,
    policy: str = "min_waste",
    recomputed: int = 1000,
    limit: int = 2,
    tenant: str = "",
    priority: int = 0,
    return_order: ReturnOrder = "fair",
) -> Stepped:
    """One sequence waits for a tool and has half of the pages, one generates, and a newcomer of a tenant and priority,
    which is to generate `limit` tokens, has too few pages left. So many tokens have just been computed again."""
    stepped = Stepped(num_pages=24, policy=policy, costs=costs, aging_s=AGING_S, return_order=return_order)
    stepped.open(WAITING, list(range(100, 196)))
    stepped.generate(WAITING, 4)
    stepped.run()
    stepped.say(wire.Expect(seq=WAITING, kind="tool", expected_in_s=expected_in_s))
    stepped.open(RUNNING, list(range(200, 232)))
    stepped.generate(RUNNING, 40)
    for _ in range(3):
        stepped.turn()
    stepped.scheduler._state.interception.recomputed.note(recomputed, stepped.now)
    stepped.open(NEWCOMER, list(range(300, 364)), tenant=tenant, priority=priority)
    stepped.generate(NEWCOMER, limit)
    return stepped


def steps_until(stepped: Stepped, reached: Callable[[], bool]) -> int:
    """How many steps it takes."""
    for count in range(200):
        if reached():
            return count
        stepped.turn()
    raise AssertionError("never")


def starts(stepped: Stepped) -> int:
    """After how many steps the newcomer has computed something."""
    newcomer = stepped.sequence(NEWCOMER)
    return steps_until(stepped, lambda: newcomer.num_computed > 0)


def test_it_waits_while_others_run_for_aging_s_at_most() -> None:
    stepped = crowded()
    num_steps = starts(stepped)
    assert num_steps == pytest.approx(AGING_S / 0.01, abs=2)
    assert stepped.sequence(RUNNING).has_work, "it still generates"
    assert stepped.pages(WAITING)[0] < 12, "the newcomer has taken pages after all"
    stepped.finish()


@pytest.mark.parametrize("policy", ["preserve", "heuristic"])
def test_where_the_policy_preserves_it_waits_at_all_times(policy: str) -> None:
    stepped = crowded(policy=policy, costs=None, recomputed=0)
    assert starts(stepped) == pytest.approx(AGING_S / 0.01, abs=2)
    assert stepped.sequence(RUNNING).has_work
    stepped.finish()


@pytest.mark.parametrize("policy", ["min_waste", "preserve"])
def test_it_starts_as_soon_as_nothing_runs(policy: str) -> None:
    stepped = crowded(policy=policy)
    stepped.say(wire.Cancel(seq=RUNNING))
    assert starts(stepped) <= 3
    stepped.finish()


@pytest.mark.parametrize("return_order", ["fair", "arrival", "last"])
def test_a_return_does_not_wait_behind_it(return_order: ReturnOrder) -> None:
    stepped = crowded(return_order=return_order)
    stepped.turn()
    assert not stepped.sequence(NEWCOMER).num_computed
    stepped.append(WAITING, [7] * 4)
    op = stepped.generate(WAITING, 2)
    steps_until(stepped, lambda: stepped.generations[op].ending is not None)
    assert not stepped.sequence(NEWCOMER).num_computed
    stepped.finish()


@pytest.mark.parametrize(
    "crowd",
    [
        {"expected_in_s": 500.0},
        {"costs": None},
        {"policy": "lru"},
        {"recomputed": 5},
        {"tenant": "another"},
        {"priority": -1},
    ],
    ids=[
        "the wait is long",
        "nothing was profiled",
        "the policy spares nothing",
        "little is computed again",
        "the KV is of another tenant",
        "its priority is worth aging_s",
    ],
)
def test_it_starts_at_once_where(crowd: dict[str, object]) -> None:
    stepped = crowded(**crowd)  # type: ignore[arg-type]
    assert starts(stepped) <= 2
    stepped.finish()


def test_the_next_newcomer_waits_as_long_again() -> None:
    """Were all of them let in that have waited for long, overload would give up all KV that waits."""
    stepped = crowded(limit=30)
    stepped.open(NEWCOMER + 1, list(range(400, 424)))
    second = stepped.sequence(NEWCOMER + 1)
    num_steps = starts(stepped) + steps_until(stepped, lambda: second.num_computed > 0)
    assert num_steps == pytest.approx(2 * AGING_S / 0.01, abs=4)
    assert stepped.sequence(NEWCOMER).has_work
    stepped.finish()


def test_a_return_does_not_wait_behind_one_that_would_pass_it() -> None:
    """The newcomer came earlier than the return counts as having come, so it is the first."""
    stepped = crowded()
    for _ in range(12):
        stepped.turn()
    op = stepped.generate(WAITING, 2)
    returned, newcomer = stepped.sequence(WAITING), stepped.sequence(NEWCOMER)
    assert returned.place.line == WARM
    assert newcomer.place.since_s < returned.place.since_s
    assert steps_until(stepped, lambda: stepped.generations[op].ending is not None) <= 4
    assert not newcomer.num_computed
    assert starts(stepped) <= 10, "it waits for no longer than before"
    stepped.finish()


@pytest.mark.parametrize(
    ("return_order", "is_gone"), [("fair", True), ("fair", False), ("arrival", True), ("last", True)]
)
def test_a_return_whose_kv_is_gone_waits_like_a_newcomer(return_order: ReturnOrder, is_gone: bool) -> None:
    """It would take as much KV from others. One of which most KV is there takes what it lacks, and so do all returns in
    the orders of the paper."""
    returning = 4
    stepped = Stepped(num_pages=24, policy="min_waste", costs=COSTS, aging_s=AGING_S, return_order=return_order)
    for seq, num_tokens, expected_in_s in ((returning, 48, 500.0), (WAITING, 96, 5.0)):
        stepped.open(seq, list(range(100 * seq, 100 * seq + num_tokens)))
        stepped.generate(seq, 4)
        stepped.run()
        stepped.say(wire.Expect(seq=seq, kind="tool", expected_in_s=expected_in_s))
    stepped.open(RUNNING, list(range(200, 264 if is_gone else 232)))
    stepped.generate(RUNNING, 60)
    steps_until(stepped, lambda: stepped.pages(returning)[0] <= (2 if is_gone else 5))
    stepped.scheduler._state.interception.recomputed.note(1000, stepped.now)
    stepped.append(returning, [9] * 4)
    stepped.generate(returning, 2)
    num_steps = steps_until(stepped, lambda: stepped.sequence(returning).num_computed > 48)
    assert num_steps >= AGING_S / 0.01 - 2 if (return_order, is_gone) == ("fair", True) else num_steps <= 5
    assert stepped.sequence(RUNNING).has_work
    stepped.finish()
