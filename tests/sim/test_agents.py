"""The coding-agent day: what is drawn, and what caches of a given size recompute of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from weft.sim.agents import AGENT_WAITS, MAIN, SUBAGENT, AgentParameters, agent_day, coarsened
from weft.sim.bounds import (
    ServiceTime,
    TimedTurn,
    farthest_next_use,
    least_recently_used,
    replay,
    timed_turns,
    working_set,
)
from weft.sim.scripts import SessionScript, TurnScript, with_subagents


@pytest.fixture(scope="module")
def day() -> list[SessionScript]:
    return agent_day(AgentParameters(), 0)


@pytest.fixture(scope="module")
def turns(day: list[SessionScript]) -> list[TimedTurn]:
    return timed_turns(day)


def test_sessions_are_those_of_the_parameters(day: list[SessionScript]) -> None:
    assert len(day) == 400
    assert day[-1].arrive_s == pytest.approx(400 / 0.02, rel=0.15)
    assert np.median([len(script.turns) for script in day]) == pytest.approx(43, rel=0.1)
    outputs = [turn.output_tokens for script in day for turn in script.turns]
    assert (min(outputs), max(outputs)) == (50, 800)
    contexts = [list(script.contexts()) for script in day]
    assert max(map(max, contexts)) <= 200_000
    assert max(map(max, contexts)) > 190_000
    assert all(script.turns[0].new_tokens == 20_000 for script in day)
    # Sessions that the limit does not cut: what a turn generates and its wait returns.
    growths = [b - a for script in contexts if script[-1] < 150_000 for a, b in itertools.pairwise(script)]
    assert np.median(growths) == pytest.approx(2_500, rel=0.12)


def test_waits_are_a_mixture_of_their_kinds(day: list[SessionScript]) -> None:
    waits = [turn for script in day for turn in script.turns[:-1] if not turn.subagents]
    for name, expected in AGENT_WAITS.items():
        seconds = [turn.wait_s for turn in waits if turn.wait_kind == name]
        assert len(seconds) / len(waits) == pytest.approx(expected.share, rel=0.1)
        assert np.median(seconds) == pytest.approx(expected.median_s, rel=0.15)
        assert np.log(seconds).std() == pytest.approx(expected.deviation, rel=0.1)


def test_some_sessions_have_subagents_on_a_shared_prompt(day: list[SessionScript]) -> None:
    share = np.mean([any(turn.subagents for turn in script.turns) for script in day])
    assert share == pytest.approx(0.44, abs=0.06)
    children = [script for script in with_subagents(day) if script.kind == SUBAGENT]
    assert {script.shared_tokens for script in children} == {12_000}
    assert not any(turn.wait_kind == "person" for script in children for turn in script.turns)
    numbers = [script.number for script in with_subagents(day)]
    assert len(set(numbers)) == len(numbers)


def test_times_follow_from_service_and_waits() -> None:
    child = SessionScript(2, SUBAGENT, 0.0, (TurnScript(40, 100),), 32)
    script = SessionScript(1, MAIN, 10.0, (TurnScript(100, 50, "x", 3.0, (child,)), TurnScript(20, 10)))
    first, sub, second = timed_turns([script])
    assert (first.begin_s, first.end_s, first.next_s) == pytest.approx((10.0, 11.0, 14.0))
    assert (sub.begin_s, sub.end_s, sub.next_s) == pytest.approx((11.0, 12.5, math.inf))
    assert (second.begin_s, second.prompt_tokens, second.known_tokens) == (14.0, 170, 149)
    slow = timed_turns([script], ServiceTime(0.5, 0.1))[-1]
    assert slow.begin_s == pytest.approx(10.0 + 5.5 + 10.5)


def test_a_coarse_day_has_the_contexts_and_times_of_the_fine_one(turns: list[TimedTurn]) -> None:
    coarse = timed_turns(coarsened(agent_day(AgentParameters(), 0), 10), ServiceTime(0.5, 0.1))
    pairs = list(zip(sorted(coarse), sorted(turns), strict=True))
    assert all(abs(a.prompt_tokens - b.prompt_tokens) == 0 for a, b in pairs)
    assert all(-1e-6 < a.end_s - a.begin_s - (b.end_s - b.begin_s) < 0.1 for a, b in pairs)


# Caches


def turn(session: int, begin_s: float, tokens: int, known: int, next_s: float = math.inf) -> TimedTurn:
    return TimedTurn(session, MAIN, begin_s, begin_s + 0.5, tokens, 1, known, 0, next_s)


def test_what_does_not_fit_is_computed_again() -> None:
    # Three sessions of 4 pages in a cache of 9: 3 of 12 pages go, of the one that returns last.
    trace = [turn(n, float(n), 64, 0, 10.0 + n) for n in (1, 2, 3)] + [turn(n, 10.0 + n, 64, 64) for n in (1, 2, 3)]
    assert replay(trace, 12, 16, farthest_next_use) == (0, 192)
    assert replay(trace, 9, 16, farthest_next_use).recomputed_tokens == 3 * 16
    # Least recently used gives up session 1, which makes 2 go when it returns, and so on.
    assert replay(trace, 9, 16, least_recently_used).recomputed_tokens > 3 * 16


def test_a_shared_prompt_is_kept_once() -> None:
    subs = [TimedTurn(n, SUBAGENT, float(n), n + 0.5, 80, 1, 0, 64, math.inf) for n in range(1, 6)]
    found = replay(subs, 6, 16, farthest_next_use)
    assert (found.recomputed_tokens, found.found_tokens) == (0, 4 * 64)
    between = turn(9, 3.5, 96, 0)
    gone = replay(sorted([*subs, between], key=lambda one: one.begin_s), 6, 16, farthest_next_use)
    assert (gone.recomputed_tokens, gone.found_tokens) == (64, 3 * 64)


def test_running_turns_may_exceed_the_cache_and_leave_nothing_idle() -> None:
    trace = [turn(3, 0.0, 16, 0, 5.0), turn(1, 1.0, 64, 0), turn(2, 1.2, 64, 0), turn(3, 5.0, 16, 16)]
    assert replay(trace, 7, 16, farthest_next_use) == (16, 0)


def _least(trace: Sequence[TimedTurn], num_pages: int) -> int:
    """The fewest tokens recomputed, by trying every number of pages that each session might keep while it waits."""
    gaps = [(one.end_s, one.next_s, one.kept_tokens) for one in trace if one.next_s < math.inf]
    best = sum(kept for _, _, kept in gaps)
    times = {one.begin_s for one in trace} | {one.end_s for one in trace}
    for held in itertools.product(*(range(kept // 16 + 1) for _, _, kept in gaps)):
        if all(_fits(trace, held, gaps, time_s, num_pages) for time_s in times):
            best = min(best, sum(kept - 16 * pages for pages, (_, _, kept) in zip(held, gaps, strict=True)))
    return best


def _fits(
    trace: Sequence[TimedTurn],
    held: Sequence[int],
    gaps: Sequence[tuple[float, float, int]],
    time_s: float,
    num_pages: int,
) -> bool:
    idle = sum(pages for pages, (from_s, to_s, _) in zip(held, gaps, strict=True) if from_s <= time_s < to_s)
    used = sum(one.prompt_tokens // 16 for one in trace if one.begin_s <= time_s < one.end_s)
    return idle == 0 or idle + used <= num_pages


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_optimum_of_small_traces(seed: int) -> None:
    source = np.random.default_rng(seed)
    trace, begin_s = [], {n: float(n) for n in range(4)}
    for _ in range(2):
        for session in range(4):
            next_s = begin_s[session] + float(source.integers(1, 9)) * 4 + session
            trace.append((session, begin_s[session], next_s))
            begin_s[session] = next_s
    sizes = [16 * int(source.integers(1, 4)) for _ in range(4)]
    last = {session: max(at for number, at, _ in trace if number == session) for session in range(4)}
    timed = []
    for session, at, next_s in sorted(trace, key=lambda one: (one[1], one[0])):
        known = 0 if at == session else sizes[session]
        timed.append(turn(session, at, sizes[session], known, math.inf if at == last[session] else next_s))
    for pages in (4, 5, 6):
        found = replay(timed, pages, 16, farthest_next_use).recomputed_tokens
        assert found == _least(timed, pages)
        assert found <= replay(timed, pages, 16, least_recently_used).recomputed_tokens


def test_a_day_recomputes_less_with_more_memory_and_least_with_the_future_known(turns: list[TimedTurn]) -> None:
    peak = working_set(turns).peak
    # Pages are whole: each session may need one more than its tokens fill.
    assert replay(turns, peak // 16 + 1000, 16, farthest_next_use).recomputed_tokens == 0
    found = {}
    for part in (0.5, 0.75):
        pages = int(peak * part) // 16
        found[part] = [
            replay(turns, pages, 16, rule).recomputed_tokens for rule in (farthest_next_use, least_recently_used)
        ]
        assert found[part][0] < found[part][1]
    assert found[0.75][0] < found[0.5][0]
