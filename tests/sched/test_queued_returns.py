"""What policies are told of the time for which returns wait for the device."""

from __future__ import annotations

import pytest

from tests.sched.stepping import Stepped
from weft.sched import wait_log
from weft.sched.wait_log import LAST_QUEUED, WaitLog


def told_s(stepped: Stepped, tenant: str = "") -> float:
    interception = stepped.scheduler._state.interception
    interception._load = None
    return interception._load_at(stepped.now).queued_s.get(tenant, 0.0)


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
    assert told_s(stepped, "another") == 0.0


def test_averages_of_many_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_log, "MAX_TENANTS", 2)
    waits = WaitLog()
    for tenant in ("one", "two", "one", "three"):
        waits.queued(tenant, 2.0)
    assert list(waits.queued_s) == ["one", "three"]
    assert waits.queued_s["one"] == pytest.approx(2.0 * (1 - (1 - LAST_QUEUED) ** 2))
