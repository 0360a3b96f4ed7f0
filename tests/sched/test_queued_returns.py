"""What policies are told of the time for which returns wait for the device."""

from __future__ import annotations

import pytest

from tests.sched.stepping import Stepped
from weft.sched.interception import LAST_QUEUED


def told_s(stepped: Stepped) -> float:
    interception = stepped.scheduler._state.interception
    interception._load = None
    return interception._load_at(stepped.now).queued_s


def test_it_is_an_average_from_arrival_to_admission() -> None:
    stepped = Stepped(num_pages=40, max_running=1)
    stepped.open(1, list(range(100, 120)))
    stepped.generate(1, 4)
    stepped.run()
    known = list(stepped.known[1])
    stepped.release(1, kind="chat")
    stepped.open(2, list(range(200, 220)))
    stepped.generate(2, 30)
    stepped.turn()
    assert told_s(stepped) == 0.0
    stepped.open(3, [*known, 5])
    stepped.generate(3, 2)
    arrival_s = stepped.now
    assert stepped.sequence(3).slot < 0
    while stepped.sequence(3).slot < 0:
        stepped.turn()
    waited_s = stepped.now - arrival_s
    assert told_s(stepped) == pytest.approx(LAST_QUEUED * waited_s, rel=0.1)
    assert waited_s > 0
    before_s = told_s(stepped)
    stepped.finish()
    stepped.open(4, [*known, 6])
    stepped.generate(4, 2)
    stepped.run()
    assert told_s(stepped) == before_s, "a request that continues nothing any more is no return"
