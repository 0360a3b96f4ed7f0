from __future__ import annotations

import math

import numpy as np
import pytest

from weft.sim.scripts import TOKEN_S, WARM_UP_S, SessionScript, TokenSource, TurnScript, scaled, window
from weft.sim.workloads import INTERCEPTIONS, MixtureParameters, mixture


@pytest.fixture(scope="module")
def drawn() -> list[SessionScript]:
    return mixture(MixtureParameters(rate=2.0, minutes=60), 0)


def of_kind(scripts: list[SessionScript], kind: str) -> list[SessionScript]:
    return [script for script in scripts if script.kind == kind]


def test_requests_arrive_at_the_rate_and_in_order(drawn: list[SessionScript]) -> None:
    arrivals = np.array([script.arrive_s for script in drawn])
    gaps = np.diff(arrivals)
    assert len(drawn) == pytest.approx(7200, rel=0.05)
    assert gaps.min() >= 0
    assert arrivals[-1] < 3600
    # Of a Poisson process: the deviation of gaps is their mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


@pytest.mark.parametrize("kind", INTERCEPTIONS)
def test_kinds_are_those_of_the_table(drawn: list[SessionScript], kind: str) -> None:
    scripts, row = of_kind(drawn, kind), INTERCEPTIONS[kind]
    waits = [turn.wait_s for script in scripts for turn in script.turns[:-1]]
    calls = [len(script.turns) - 1 for script in scripts]
    assert len(scripts) == pytest.approx(1200, rel=0.1)
    # Cutting normal distributions off at their least values raises the means of wide ones.
    assert np.mean(waits) == pytest.approx(row.exec_s.mean, rel=0.06)
    assert np.mean(calls) == pytest.approx(row.calls.mean, rel=0.1)
    assert min(calls) >= 1
    assert all(script.turns[-1].wait_kind == "" for script in scripts)
    assert all(turn.wait_kind == kind for script in scripts for turn in script.turns[:-1])


@pytest.mark.parametrize("kind", ["math", "qa"])
def test_contexts_are_those_at_a_call(drawn: list[SessionScript], kind: str) -> None:
    means = [np.mean(list(script.contexts())[:-1]) for script in of_kind(drawn, kind)]
    expected = INTERCEPTIONS[kind].context_tokens
    assert np.mean(means) == pytest.approx(expected.mean, rel=0.05)
    assert np.std(means) == pytest.approx(expected.deviation, rel=0.12)


def test_what_a_session_keeps_while_it_waits_bounds_what_fits_a_device() -> None:
    """Token-seconds in pages of 16, of half an hour of arrivals: the bound on `preserve` in docs/benchmarks.md."""
    kept = []
    for session in mixture(MixtureParameters(rate=1.0), 0):
        context = token_seconds = 0.0
        for turn in session.turns:
            context += turn.new_tokens + turn.output_tokens
            token_seconds += turn.wait_s * 16 * np.ceil(context / 16)
        kept.append(token_seconds)
    assert round(float(np.mean(kept)), -2) == 79_400
    assert round(52_000 / float(np.mean(kept)), 2) == 0.65


def test_lengths_follow_the_parameters() -> None:
    changed = MixtureParameters(rate=1.0, minutes=30, generated_tokens=(5, 9), returned_factor=3.0)
    scripts = mixture(changed, 0)
    outputs = {turn.output_tokens for script in scripts for turn in script.turns}
    returned = [turn.new_tokens for script in of_kind(scripts, "qa") for turn in script.turns[1:]]
    assert outputs == {5, 6, 7, 8, 9}
    assert np.median(returned) == pytest.approx(450, rel=0.1)


def test_a_seed_gives_one_workload() -> None:
    parameters = MixtureParameters(rate=1.0, minutes=2)
    assert mixture(parameters, 1) == mixture(parameters, 1) != mixture(parameters, 2)


def test_a_number_of_requests_replaces_the_time_for_which_they_arrive(drawn: list[SessionScript]) -> None:
    counted = mixture(MixtureParameters(rate=2.0, minutes=1, requests=500), 0)
    assert counted == drawn[:500]
    at_once = mixture(MixtureParameters(rate=np.inf, requests=500), 0)
    assert {script.arrive_s for script in at_once} == {0.0}
    assert [script.turns for script in at_once] == [script.turns for script in counted]


def test_scaled_sessions_keep_their_turns() -> None:
    child = SessionScript(8, "subagent", 0.0, (TurnScript(41, 7),), 40)
    script = SessionScript(7, "qa", 3.0, (TurnScript(100, 30, "qa", 2.0, (child,)), TurnScript(1, 9)), 80)
    [found] = scaled([script], 0.25, 0.5)
    assert found.turns == (TurnScript(25, 8, "qa", 1.0, (found.turns[0].subagents[0],)), TurnScript(1, 2))
    assert (found.number, found.kind, found.arrive_s, found.shared_tokens) == (7, "qa", 3.0, 20)
    # A prompt of 10 tokens has one that is not shared.
    assert found.turns[0].subagents == (SessionScript(8, "subagent", 0.0, (TurnScript(10, 2),), 9),)


def test_a_window_has_the_turns_that_are_due_in_it() -> None:
    # Turns are due at 0, 10 + 10 TOKEN_S and 30 + 30 TOKEN_S seconds.
    turns = (TurnScript(100, 10, "qa", 10.0), TurnScript(5, 20, "qa", 20.0), TurnScript(7, 30))
    script = SessionScript(1, "qa", 0.0, turns)
    later = SessionScript(2, "qa", 20.0, turns)
    [whole] = window([script], 0.0, 100.0)
    assert whole == script
    [begun] = window([script], 0.0, 20.0)
    assert begun.turns == (turns[0], TurnScript(5, 20))
    under_way, arriving = window([script, later], 5.0, 25.0)
    # The answer's last token has no KV: it is generated again.
    wait_s = under_way.turns[0].wait_s
    assert wait_s == pytest.approx(WARM_UP_S + 10.0 + 10 * TOKEN_S - 5.0)
    assert under_way == script._replace(turns=(TurnScript(109, 1, "qa", wait_s), TurnScript(5, 20)), num_before=1)
    assert arriving == later._replace(arrive_s=15.0 + WARM_UP_S, turns=(TurnScript(100, 10),))
    # One that waits throughout has a context, one that has ended has none, and one that comes later is not there.
    [waiting] = window([script], 15.0, 20.0)
    assert waiting.turns == (TurnScript(134, 1),)
    assert window([script], 31.0, 40.0) == window([later], 0.0, 20.0) == []


def test_sessions_under_way_begin_evenly_before_a_window() -> None:
    drawn = mixture(MixtureParameters(rate=2.0, requests=400), 0)
    found = window(drawn, 100.0, 130.0)
    begin = [script.arrive_s for script in found if script.turns[0].output_tokens == 1]
    assert begin == pytest.approx([WARM_UP_S * i / len(begin) for i in range(len(begin))])
    assert all(script.arrive_s >= WARM_UP_S for script in found[len(begin) :])
    assert max(script.arrive_s for script in found) < WARM_UP_S + 30.0


def test_tokens_depend_on_the_session_and_its_shared_prompt_on_the_kind() -> None:
    first, second = (TokenSource(5, 1000) for _ in range(2))
    own = first.own(3)
    assert own.take(4) + own.take(6) == second.own(3).take(10)
    assert first.own(3).take(10) != first.own(4).take(10) != TokenSource(6, 1000).own(4).take(10)
    assert first.shared("a", 5) == second.shared("a", 8)[: 5 * 4]
    assert first.shared("a", 5) != first.shared("b", 5)


def test_requests_that_come_at_once_have_a_number() -> None:
    with pytest.raises(ValueError, match="need a number"):
        mixture(MixtureParameters(rate=math.inf), 0)
    assert [script.arrive_s for script in mixture(MixtureParameters(rate=math.inf, requests=3), 0)] == [0.0] * 3
