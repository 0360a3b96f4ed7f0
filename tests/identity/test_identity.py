"""In float64, tokens do not depend on what else runs: no tolerance, no retries."""

from __future__ import annotations

from functools import cache

import pytest

from bench.identity import GRAMMARS, Outcomes, Request, Runner, random_requests, same_as_far_as_both_go, schedules

REQUESTS = 40
WAYS = schedules("float64")


@cache
def requests(number: int = REQUESTS) -> list[Request]:
    return random_requests(number, seed=11)


@cache
def outcomes(way: str, number: int = REQUESTS) -> tuple[Outcomes, int, int]:
    """The outcomes of a way to run, with its preemptions and evictions."""
    config, together = WAYS[way]
    runner = Runner(config)
    result = runner.run(requests(number), together)
    stats = runner.engine.stats()
    runner.close()
    return result, stats.preemptions, stats.evictions


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [REQUESTS, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "alone"])
def test_tokens_do_not_depend_on_the_schedule(way: str, number: int) -> None:
    alone, _, _ = outcomes("alone", number)
    other, preemptions, evictions = outcomes(way, number)
    for request, expected, got in zip(requests(number), alone, other, strict=True):
        for fork in range(len(request.samplers)):
            assert same_as_far_as_both_go(request, expected.tokens[fork], got.tokens[fork])
    if "pool" in way:
        assert preemptions > 0, "the pool was too large to show anything"
        assert evictions > 0


def test_the_requests_are_worth_comparing() -> None:
    assert any(len(request.samplers) > 1 for request in requests())
    assert any(request.cancel_after for request in requests())
    assert {request.grammar for request in requests()} >= set(GRAMMARS)
    assert len({tuple(request.prompt[:20]) for request in requests()}) < REQUESTS, "no prefix is shared"
    assert len({tuple(tokens) for outcome in outcomes("alone")[0] for tokens in outcome.tokens}) > REQUESTS / 2
