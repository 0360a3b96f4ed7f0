"""The order by kind and time waited, with all waits of a trace known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.sim.agents import MAIN, AgentParameters, agent_day, coarsened
from weft.sim.bounds import (
    ServiceTime,
    TimedTurn,
    farthest_next_use,
    least_recently_used,
    replay,
    timed_turns,
    working_set,
)
from weft.sim.hindsight import _chance_per_s, replay_by_kind


def turn(session: int, begin_s: float, known: int, next_s: float, kind: str) -> TimedTurn:
    """Of four pages."""
    return TimedTurn(session, MAIN, begin_s, begin_s + 0.5, 64, 1, known, 0, next_s, kind)


def test_the_chance_is_that_of_waits_that_lasted_as_long() -> None:
    waits_s = np.array([1.0, 2.0, 4.0, 8.0, math.inf, math.inf])
    found = _chance_per_s(waits_s, np.array([0.0, 3.0, 9.0]))
    assert found == pytest.approx([(4 / 6) / 4.0, (2 / 4) / 5.0, 0.0])


def test_what_never_returns_goes_before_what_has_waited_longer() -> None:
    # Room for two of three: the tool's session has waited longest when the third begins, and it alone returns.
    trace = [
        turn(1, 0.0, 0, 20.0, "tool"),
        turn(2, 1.0, 0, math.inf, "person"),
        turn(3, 2.0, 0, math.inf, "person"),
        turn(1, 20.0, 64, math.inf, "tool"),
    ]
    assert replay(trace, 8, 16, least_recently_used).recomputed_tokens == 64
    assert replay_by_kind(trace, 8, 16).recomputed_tokens == 0


def test_a_day_lies_between_prefix_caching_and_the_optimum() -> None:
    scripts = coarsened(agent_day(AgentParameters(sessions=40), 0), 20)
    turns = timed_turns(scripts, ServiceTime(0.5, 0.2))
    pages = working_set(turns).peak // 2 // 16
    least, most = (
        replay(turns, pages, 16, rule).recomputed_tokens for rule in (farthest_next_use, least_recently_used)
    )
    assert least < replay_by_kind(turns, pages, 16).recomputed_tokens < most
