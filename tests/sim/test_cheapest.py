"""The bound that charges each wait its cheapest choice."""

from __future__ import annotations

import pytest

from tests.sim.small import session, small_device, small_settings
from weft.sched.policies.runs import Load
from weft.sim.cheapest import cheapest_waste
from weft.sim.records import SessionRecord, TurnRecord
from weft.sim.run import simulate

LOAD = Load(0.0, running_tokens=500, running_rows=4, saturation_tokens=64, costs=small_device().costs())
"""Steps of 10 ms and 1 ms for each token; a page takes 1 ms to move."""
SCRIPTS = [session(1, (60, 5, 30.0), (10, 2, 0.0))]
CONTEXT, HELD = 64, 64
"""Tokens at the end of the first turn that have KV, and those that their pages have room for."""


def waited(wait_s: float) -> list[SessionRecord]:
    """The session of `SCRIPTS`: its wait is from 10 s on."""
    turns = [TurnRecord(9.0, 9.5, 10.0, 60, 0, 5), TurnRecord(10.0 + wait_s, 10.1 + wait_s, 11.0 + wait_s, 75, 64, 2)]
    return [SessionRecord(1, "test", 9.0, turns, tools_s=wait_s, end_s=11.0 + wait_s)]


def test_a_wait_is_charged_for_the_time_under_pressure() -> None:
    def charged(*pressed: tuple[float, float]) -> float:
        return cheapest_waste(SCRIPTS, waited(2.0), pressed, LOAD)

    assert charged() == charged((0.0, 10.0), (12.0, 20.0)) == 0.0
    assert charged((0.0, 10.01)) == pytest.approx(0.01 * HELD)
    assert charged((9.0, 10.01), (10.5, 10.52), (11.99, 30.0)) == pytest.approx(0.04 * HELD)


def test_a_long_wait_is_charged_for_computing_again() -> None:
    # Two chunks of 32 tokens beside 4 rows: half of the context is held, and 500 tokens of others wait.
    again = 0.064 * CONTEXT / 2 + 0.064 * 500
    assert cheapest_waste(SCRIPTS, waited(20.0), [(0.0, 50.0)], LOAD) == pytest.approx(again)


def test_with_a_host_tier_moving_may_be_cheaper() -> None:
    # Four pages, behind forwards: half of the context is held on the way in, nothing on the way out.
    with_host = LOAD._replace(host_pages=100, swap_hidden=1.0)
    assert cheapest_waste(SCRIPTS, waited(20.0), [(0.0, 50.0)], with_host) == pytest.approx(4 * 0.001 * CONTEXT / 2)


def test_waits_that_have_not_ended_are_not_charged() -> None:
    [record] = waited(20.0)
    record.turns = record.turns[:1]
    assert cheapest_waste(SCRIPTS, [record], [(0.0, 50.0)], LOAD) == 0.0


def test_a_summary_has_it_beside_the_waste_of_the_same_steps() -> None:
    # Two sessions need most of the pool, so one waits for pages, and meanwhile a third of 11 tokens waits for a tool.
    # To compute these again lengthens a step by 11 ms, in which the other one holds its 500 to 600 tokens.
    scripts = [session(1, (500, 100, 0.0)), session(2, (500, 10, 0.0), arrive_s=0.1)]
    waiting = session(3, (10, 2, 1.2), (5, 1, 0.0))
    found = simulate(small_device(48), [waiting, *scripts], small_settings()).summary
    other = simulate(small_device(48), scripts, small_settings()).summary
    charged = found.pressed_cheapest_share * found.pressed_s * 48 * 16
    assert 0.011 * 450 < charged < 0.011 * 620
    assert other.pressed_cheapest_share == 0.0 < other.pressed_s <= other.busy_s
