"""More sessions arrive than can be served, and as many are completed as if no more arrived than can be."""

from __future__ import annotations

import random

import pytest

from tests.sim.small import small_settings
from weft.core.cost.model import SwapModel
from weft.sim.devices import Device, linear_forward
from weft.sim.run import simulate
from weft.sim.scripts import SessionScript, TurnScript
from weft.sim.sessions import Driving

SATURATED = 0.4
"""Sessions per second that take all of the device's time."""
SWAP = SwapModel(base_s=0.0, per_page_s=0.004)
DEVICE = Device(
    name="slow",
    about="a device with few steps per second, on which about forty sessions have room in both tiers",
    kv_tokens=16 * 64,
    forward=linear_forward(0.2, 0.004),
    swap_out=SWAP,
    swap_in=SWAP,
    saturation_tokens=64,
)


def sessions(per_second: float, seconds: float) -> list[SessionScript]:
    """One to nine turns each, with waits of up to 20 seconds between them."""
    chance, found, arrive_s = random.Random(0), [], 0.0
    while (arrive_s := arrive_s + chance.expovariate(per_second)) < seconds:
        count = chance.randint(1, 9)
        turns = [
            TurnScript(8 if index else 60, chance.randint(6, 18), "tool", chance.uniform(1, 20))
            for index in range(count)
        ]
        found.append(SessionScript(len(found) + 1, "test", arrive_s, tuple(turns)))
    return found


def ends_s(per_second: float, driving: Driving, seconds: float) -> list[float]:
    """When sessions were completed, while others arrived."""
    settings = small_settings(policy="min_waste", driving=driving, host_tokens=16 * 400, to_end=False)
    records = simulate(DEVICE, sessions(per_second, seconds), settings, arrivals_s=seconds).records
    return [record.end_s for record in records if record.end_s is not None]


def test_in_overload_no_fewer_sessions_are_completed_the_longer_it_lasts() -> None:
    """Where newcomers came before returns, half as many were completed after three minutes as before."""
    ends = ends_s(3 * SATURATED, "programs", 360.0)
    late = sum(end_s > 180.0 for end_s in ends)
    assert late >= len(ends) - late > 40


@pytest.mark.soak
@pytest.mark.parametrize("driving", ["programs", "clients"])
def test_in_overload_as_many_sessions_are_completed_as_can_be_served(driving: Driving) -> None:
    assert len(ends_s(3 * SATURATED, driving, 900.0)) >= 0.95 * len(ends_s(SATURATED, driving, 900.0))
