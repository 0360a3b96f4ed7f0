"""When a step waits for those who are about to come back, on paper and on a fake worker."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from weft.config import EngineConfig
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.engine.gather import MOST_WAIT_S, Adaptive, Eager, Gather, KOnly, Ready, TOnly, policy_of


def test_nobody_is_waited_for_where_nobody_was_answered() -> None:
    assert Adaptive().wait_s(Ready(4, 0, 0.010, 0.0, 0.001)) == 0


def test_as_many_are_waited_for_while_all_gain() -> None:
    # Eight ready, eight to come back within 1 ms, a step of 10 ms: waiting pays for up to 5 ms.
    assert Adaptive().wait_s(Ready(8, 8, 0.010, 0.0, 0.001)) == pytest.approx(0.002)
    assert Adaptive().wait_s(Ready(8, 8, 0.010, 0.0015, 0.001)) == pytest.approx(0.0005)
    assert Adaptive().wait_s(Ready(8, 8, 0.010, 0.003, 0.001)) == 0
    assert Adaptive().wait_s(Ready(8, 8, 0.010, 0.0, 0.004)) == pytest.approx(0.005)
    assert Adaptive().wait_s(Ready(8, 8, 0.010, 0.0, 0.006)) == 0  # they need longer than it pays


def test_one_straggler_does_not_hold_many_up() -> None:
    assert Adaptive().wait_s(Ready(99, 1, 0.010, 0.0, 0.001)) == 0


def test_other_policies() -> None:
    assert Eager().wait_s(Ready(1, 9, 1.0, 0.0, 0.0)) == 0
    assert KOnly(4).wait_s(Ready(3, 0, 1.0, 0.01, 0.0)) == pytest.approx(MOST_WAIT_S - 0.01)
    assert KOnly(4).wait_s(Ready(4, 0, 1.0, 0.0, 0.0)) == 0
    assert TOnly(0.02).wait_s(Ready(1, 0, 1.0, 0.005, 0.0)) == pytest.approx(0.015)
    kinds = [type(policy_of(EngineConfig(batching=name))) for name in ("adaptive", "eager", "k", "t")]
    assert kinds == [Adaptive, Eager, KOnly, TOnly]


def test_who_stays_away_is_not_waited_for_again() -> None:
    gather = Gather(Adaptive())
    gather.stepped(0.010)
    for who in (1, 2, 3):
        gather.answered((1, who), 1.0)
    gather.returned(1, [wire.Cancel(seq=1)], 1.001)
    gather.returned(1, [wire.Cancel(seq=2)], 1.001)
    assert gather.wait_s(2, 1.0002) > 0  # the third may come any moment
    gather.answered((1, 1), 1.020)
    gather.returned(1, [wire.Cancel(seq=1)], 1.021)
    assert gather.wait_s(1, 1.021) == 0  # it has been away for a whole step
    gather.answered((1, 2), 1.040)
    gather.gone(1)
    assert gather.wait_s(1, 1.040) == 0


def test_loops_fall_into_one_step() -> None:
    """Two programs that have got out of step: while one is computed for, the other waits, and then both go together."""
    driver = Driver(0, device_s=lambda step: 0.010, lenient=True)

    def ask(number: int) -> None:
        driver.send(
            wire.Append(
                seq=number, op=next(driver.numbers), tokens=pack_tokens([5]), outputs=wire.PromptOutputs(dist=1)
            )
        )

    for number in (1, 2):
        driver.send(wire.Open(seq=number))
    ask(1)
    driver.engine.step()  # launched for the first
    ask(2)
    assert driver.engine.gather_s() == 0
    driver.engine.step()  # takes in the first one's answer, and launches nothing meanwhile
    answered = [event for event in driver.others if isinstance(event, wire.Finished)]
    assert len(answered) == 1
    # The second is ready, the first was answered a moment ago.
    driver.engine._gather._return_s = 0.001
    assert driver.engine.gather_s() > 0
    driver.clock.advance(0.0005)
    ask(1)
    assert driver.engine.gather_s() == 0
    before = driver.engine.scheduler.stats().steps
    driver.run()
    assert driver.engine.scheduler.stats().steps == before + 1
    assert len([event for event in driver.others if isinstance(event, wire.Finished)]) == 3


def test_eager_gives_each_a_step() -> None:
    driver = Driver(0, max_rows=1, lenient=True)
    for number in (1, 2, 3):
        driver.send(
            wire.Open(seq=number),
            wire.Append(
                seq=number, op=next(driver.numbers), tokens=pack_tokens([5]), outputs=wire.PromptOutputs(dist=1)
            ),
        )
    driver.run()
    assert driver.engine.scheduler.stats().steps == 3


class Seen:
    """A policy that remembers what it was asked with."""

    def __init__(self) -> None:
        self.ready: list[Ready] = []

    def wait_s(self, ready: Ready) -> float:
        self.ready.append(ready)
        return 1.0


def test_no_policy_waits_longer_than_the_bound() -> None:
    gather = Gather(Seen())
    gather.answered((1, 1), 10.0)
    assert gather.wait_s(1, 10.0) == 1.0
    assert gather.wait_s(1, 10.0 + MOST_WAIT_S) == 0.0


def test_who_has_not_come_back_by_the_next_answer_does_something_else() -> None:
    seen = Seen()
    gather = Gather(seen)
    gather.answered((1, 1), 10.0)
    gather.answered((1, 2), 10.0)
    gather.wait_s(1, 10.0)
    gather.answered((1, 3), 10.01)
    gather.wait_s(1, 10.01)
    assert [ready.num_answered for ready in seen.ready] == [2, 1]
