"""Where requests of different objectives go, decided by the router alone."""

from __future__ import annotations

import math

import pytest

from tests.cluster.test_router import Front, prompt
from weft.cluster.route_costs import EngineView, RoutedWork, Work, background_s, foreground_s
from weft.cluster.router import RoutedRequest
from weft.core.objectives import Objective
from weft.sched.step_share import held_factor
from weft.sim.devices import linear_forward

VIEW = EngineView(True, 1, 8, 1000, 16, linear_forward(0.010, 0.001), held_factor=3.0)
"""10 ms of every step, 1 ms of each of its tokens."""
REQUEST = RoutedWork(num_tokens=32, num_found=0, output=20, num_choices=1)


def routes(front: Front, objectives: list[Objective]) -> list[RoutedRequest]:
    """Requests with prompts of their own that have their first token and go on."""
    found = []
    for number, objective in enumerate(objectives):
        found.append(front.route(prompt(number, 32), objective=objective, max_output=20))
        front.router.answered(found[-1])
    return found


def test_background_keeps_away_from_engines_with_foreground() -> None:
    front = Front(3, held_factor=3.0)
    [chat] = routes(front, ["latency"])
    others = routes(front, ["throughput", "batch", "deadline"] * 2)
    assert chat.engine not in {routed.engine for routed in others}


def test_background_goes_beside_foreground_where_it_would_wait_longer_elsewhere() -> None:
    front = Front(2, held_factor=3.0)
    [chat] = routes(front, ["latency"])
    waiting = [front.route(prompt(9 + number, 200), objective="throughput").engine for number in range(12)]
    assert waiting[0] == 1 - chat.engine
    assert chat.engine in waiting


def test_without_a_profile_nothing_is_held_and_background_is_spread() -> None:
    front = Front(2, forward=None, held_factor=1.0)
    [chat] = routes(front, ["latency"])
    assert {routed.engine for routed in routes(front, ["throughput"] * 4)} == {0, 1}
    assert chat.engine == 0


@pytest.mark.parametrize("objective", ["latency", "ttft"])
def test_foreground_gathers_where_there_is_background(objective: Objective) -> None:
    front = Front(3, held_factor=3.0)
    [first] = routes(front, [objective])
    routes(front, ["throughput"] * 6)
    assert {routed.engine for routed in routes(front, [objective] * 3)} == {first.engine}


def test_foreground_alone_is_spread() -> None:
    front = Front(3, held_factor=3.0)
    assert sorted(routed.engine for routed in routes(front, ["latency"] * 3)) == [0, 1, 2]


def test_foreground_gathers_for_background_that_is_expected() -> None:
    front = Front(3, held_factor=3.0)
    for _ in range(100):
        for routed in routes(front, ["throughput"]):
            front.end(routed)
    chats = routes(front, ["latency"] * 3)
    assert len({routed.engine for routed in chats}) == 1
    for _ in range(500):
        for routed in routes(front, ["latency"]):
            front.end(routed)
    assert len({routed.engine for routed in [*chats, *routes(front, ["latency"] * 3)]}) > 1, "long ago"


def test_too_much_foreground_takes_another_engine() -> None:
    front = Front(2, held_factor=3.0)
    routes(front, ["throughput"])
    chats = [routed.engine for routed in routes(front, ["latency"] * 12)]
    assert set(chats) == {0, 1}, "eight run at once"
    assert chats[:6] == [chats[0]] * 6


def test_times_by_hand() -> None:
    """A prompt of 32 tokens takes 42 ms; a step of n tokens 10 + n ms."""
    chats, documents = Work(rows=2, kv_tokens=64), Work(prompt_tokens=100, rows=4, kv_tokens=400)
    assert background_s(VIEW, Work(), Work(), REQUEST) == pytest.approx(0.042 + 20 * 0.011)
    # Prompts take three times as long beside chats, which no step of 3 or 4 more tokens exceeds: 17 ms.
    held_s = 3 * (0.110 + 0.042) + 20 * 0.017
    assert background_s(VIEW, chats, documents, REQUEST) == pytest.approx(held_s)
    # A step of 7 tokens takes 17 ms, no more than half as long again as one of 3. Two thirds of a third is alone.
    own_s = 0.042 + 20 * 0.017
    assert foreground_s(VIEW, chats, documents, REQUEST, 0.0) == pytest.approx(own_s * (1 + 2 / 9))
    assert foreground_s(VIEW, Work(), Work(), REQUEST, 0.5) == pytest.approx((0.042 + 20 * 0.011) * (1 + 1 / 3))
    many = Work(rows=40, kv_tokens=400)
    own_s = 0.042 + 20 * 0.018
    assert foreground_s(VIEW, chats, many, REQUEST, 0.0) == pytest.approx(own_s * (1 + 2 / 9)), "eight run at once"
    wide, own_s = VIEW._replace(max_running=100), 0.042 + 20 * 1.5 * 0.013
    assert foreground_s(wide, chats, many, REQUEST, 0.0) == pytest.approx(own_s * (1 + 2 / 9)), "and are held back"


@pytest.mark.parametrize(
    ("latency_factor", "min_share", "times"), [(1.5, 0.1, 3.0), (1.0, 0.1, 10.0), (1.05, 0.2, 5.0), (2.0, 0.0, 2.0)]
)
def test_what_is_held_back_gets_the_rest_of_a_step_or_its_share(
    latency_factor: float, min_share: float, times: float
) -> None:
    assert held_factor(latency_factor, min_share) == pytest.approx(times)


def test_background_that_gets_nothing_beside_foreground_goes_anywhere_else() -> None:
    front = Front(2, held_factor=held_factor(1.0, 0.0))
    [chat] = routes(front, ["latency"])
    assert {routed.engine for routed in routes(front, ["batch"] * 9)} == {1 - chat.engine}
    routes(front, ["latency"] * 20)
    assert routes(front, ["batch"])[0].engine in (0, 1)
    never = VIEW._replace(held_factor=math.inf)
    busy = Work(rows=40, kv_tokens=400)
    # Foreground is not lengthened at all: a step of three of its rows takes 13 ms.
    own_s = 0.042 + 20 * 0.013
    found_s = foreground_s(never._replace(max_running=100), Work(rows=2, kv_tokens=64), busy, REQUEST, 0.0)
    assert found_s == pytest.approx(own_s * (1 + 1 / 3))
    assert background_s(never, busy, Work(), REQUEST) == math.inf
