"""Sequences that come back from the host and lack the same tokens: one computes them, the others continue from it."""

from __future__ import annotations

import pytest

from tests.sched.stepping import Stepped
from weft.core.cost.model import MoveBudget
from weft.sched.sequence import SequenceState

SHARED = [7 + index % 50 for index in range(48)]
"""Six pages."""
MESSAGE = list(range(200, 232))
"""Four pages."""
OWN = 5
"""Tokens that each sequence adds to the message."""


def forks(count: int, *, policy: str = "swap", **config: int) -> Stepped:
    """Idle sequences with the same tokens."""
    stepped = Stepped(policy=policy, max_running=6, max_context=190, **{"num_host_pages": 64, **config})
    stepped.open(1, SHARED)
    stepped.generate(1, 1)
    stepped.run()
    for child in range(2, count + 1):
        stepped.fork(1, child)
    stepped.run()
    return stepped


def tell(stepped: Stepped, count: int) -> list[int]:
    """Give all the same message, and each some tokens of its own. Returns their generations."""
    generations = []
    for seq in range(1, count + 1):
        stepped.append(seq, MESSAGE + [900 + seq] * OWN)
        generations.append(stepped.generate(seq, 3))
    return generations


def deferred(stepped: Stepped) -> list[int]:
    return [s.handle for s in stepped.scheduler.sequences if s.state is SequenceState.DEFERRED]


@pytest.mark.parametrize("budget", [1, 4, 1024])
@pytest.mark.parametrize("count", [2, 6])
def test_what_all_of_them_lack_is_computed_once(count: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each = MoveBudget(budget, steps=1)
    monkeypatch.setattr("weft.sched.interception.Interception._move_budget", lambda _: each)
    stepped = forks(count, num_pages=80)
    assert all(stepped.pages(seq) == (0, 6) for seq in range(1, count + 1))
    before = stepped.scheduler.stats().prefill_tokens
    tell(stepped, count)
    stepped.run()
    # The first token of the answer to SHARED has no KV yet.
    assert stepped.scheduler.stats().prefill_tokens - before == 1 + len(MESSAGE) + count * OWN
    stepped.finish()


def test_a_run_that_was_forgotten_in_part_is_computed_once() -> None:
    stepped = forks(3, policy="lru", num_pages=24, num_host_pages=8)
    for number, length in ((8, 184), (9, 56)):
        stepped.open(number, [number] * length)
        stepped.run()
        stepped.release(number)
    assert [stepped.pages(seq) for seq in (1, 2, 3)] == [(0, 3)] * 3
    before = stepped.scheduler.stats()
    tell(stepped, 3)
    stepped.run()
    after = stepped.scheduler.stats()
    assert after.prefill_tokens - before.prefill_tokens == 24 + 1 + len(MESSAGE) + 3 * OWN
    assert after.recomputed_tokens - before.recomputed_tokens == 24
    stepped.finish()


@pytest.mark.parametrize("is_first", [False, True])
def test_the_others_go_on_when_one_of_them_is_released(is_first: bool) -> None:
    stepped = forks(3, num_pages=80, max_step_tokens=16)
    generations = tell(stepped, 3)
    for _ in range(5):
        if len(deferred(stepped)) < 2:
            stepped.turn()
    waiting = deferred(stepped)
    assert len(waiting) == 2
    [first] = [s.handle for s in stepped.scheduler.sequences.running.values()]
    assert {len(stepped.sequence(seq).table.pages) for seq in waiting} <= {0, 6}, "shared pages and no others"
    stepped.release(first if is_first else waiting[0])
    stepped.run()
    assert [len(stepped.generations[op].tokens) for op in generations].count(3) == 2
    stepped.finish()


@pytest.mark.parametrize("num_pages", range(12, 24))
def test_they_end_however_few_pages_there_are(num_pages: int) -> None:
    stepped = forks(6, num_pages=num_pages, max_step_tokens=16)
    generations = tell(stepped, 6)
    stepped.open(20, list(range(400, 460)), priority=-1)
    generations.append(stepped.generate(20, 8))
    stepped.run()
    assert all(stepped.generations[op].ending is not None for op in generations)
    stepped.finish()
