"""Newcomers wait rather than have KV given up that is worth more than their start, and never for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sched.policies.snapshots import line
from tests.sched.stepping import Stepped
from weft.core import wire
from weft.core.cost.model import CostModel

AGING_S = 0.2
WAITING, RUNNING, NEWCOMER = 1, 2, 3
COSTS = line(per_token_s=0.1)
"""To compute 100 tokens again takes 10 s, in which they and 50 others wait: as much waste as to keep them for 10 s."""


def crowded(
    *, expected_in_s: float, costs: CostModel | None = COSTS, policy: str = "min_waste", limit: int = 2
) -> Stepped:
    """One sequence waits for a tool and has half of the pages, one generates, and a newcomer, which is to generate
    `limit` tokens, has too few pages left."""
    stepped = Stepped(num_pages=24, policy=policy, costs=costs, aging_s=AGING_S)
    stepped.open(WAITING, list(range(100, 196)))
    stepped.generate(WAITING, 4)
    stepped.run()
    stepped.say(wire.Expect(seq=WAITING, kind="tool", expected_in_s=expected_in_s))
    stepped.open(RUNNING, list(range(200, 232)))
    stepped.generate(RUNNING, 40)
    for _ in range(3):
        stepped.turn()
    stepped.open(NEWCOMER, list(range(300, 364)))
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
    stepped = crowded(expected_in_s=5.0)
    num_steps = starts(stepped)
    assert num_steps == pytest.approx(AGING_S / 0.01, abs=2)
    assert stepped.sequence(RUNNING).has_work, "it still generates"
    assert stepped.pages(WAITING)[0] < 12, "the newcomer has taken pages after all"
    stepped.finish()


def test_it_starts_as_soon_as_nothing_runs() -> None:
    stepped = crowded(expected_in_s=5.0)
    stepped.say(wire.Cancel(seq=RUNNING))
    assert starts(stepped) <= 3
    stepped.finish()


def test_a_return_does_not_wait_behind_it() -> None:
    stepped = crowded(expected_in_s=5.0)
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
        {"expected_in_s": 5.0, "costs": None},
        {"expected_in_s": 5.0, "policy": "lru"},
    ],
    ids=["the wait is long", "nothing was profiled", "the policy spares nothing"],
)
def test_it_starts_at_once_where(crowd: dict[str, object]) -> None:
    stepped = crowded(**crowd)  # type: ignore[arg-type]
    assert starts(stepped) <= 2
    stepped.finish()


def test_the_next_newcomer_waits_as_long_again() -> None:
    """Were all of them let in that have waited for long, overload would give up all KV that waits."""
    stepped = crowded(expected_in_s=5.0, limit=30)
    stepped.open(NEWCOMER + 1, list(range(400, 424)))
    second = stepped.sequence(NEWCOMER + 1)
    num_steps = starts(stepped) + steps_until(stepped, lambda: second.num_computed > 0)
    assert num_steps == pytest.approx(2 * AGING_S / 0.01, abs=4)
    assert stepped.sequence(NEWCOMER).has_work
    stepped.finish()
