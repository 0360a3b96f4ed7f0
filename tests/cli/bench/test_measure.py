"""Figures from known times, and against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from weft.cli.bench.measure import (
    Failure,
    Spread,
    Targets,
    Timing,
    cached_share,
    distribution,
    doubts,
    latencies,
    load_figures,
    over_runs,
    parse_targets,
)

TWO = [Timing(0.0, 0.25, [1.0, 1.5, 3.5], 3, 10, 4), Timing(10.0, 10.0, [10.5], 1, 30, 16)]
"""Due at 0 and 10: the first was sent late, the second has one token."""


def series(seed: int) -> list[float]:
    """Values of any sign, some of them equal; of a length that the seed says."""
    generator = np.random.default_rng(seed)
    return (generator.normal(0, 1000, size=1 + seed % 40).round(generator.integers(0, 3))).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_distributions_are_numpys(seed: int) -> None:
    values = series(seed)
    found = distribution("x_ms", values)
    assert found["x_ms_mean"] == pytest.approx(1000 * float(np.mean(values)))
    for percent in (50, 90, 95, 99):
        assert found[f"x_ms_p{percent}"] == pytest.approx(1000 * float(np.percentile(values, percent)))
    assert distribution("x_ms", []) == {}


def test_latencies_count_from_when_a_request_was_due():
    assert [timing.first_s for timing in TWO] == [1.0, 0.5]
    assert [timing.total_s for timing in TWO] == [3.5, 0.5]
    assert TWO[0].gaps_s == [0.5, 2.0]
    assert [timing.per_token_s for timing in TWO] == [1.25, None]
    found = latencies(TWO)
    assert (found["ttft_ms_p50"], found["itl_ms_p50"], found["e2e_ms_p50"]) == (750, 1250, 2000)
    assert found["tpot_ms_mean"] == found["tpot_ms_p99"] == 1250


def test_latencies_without_a_second_token_have_no_gaps():
    assert not any(name.startswith(("itl", "tpot")) for name in latencies([TWO[1]]))


def test_several_tokens_in_one_event_are_one_gap_and_so_many_tokens():
    timing = Timing(0.0, 0.0, [1.0, 3.0], 5)
    assert timing.gaps_s == [2.0]
    assert timing.per_token_s == 0.5


def test_targets():
    timing = Timing(0.0, 0.5, [1.0, 2.0], 2)
    assert Targets().kept_by(timing)
    assert Targets(ttft=1.0, tpot=1.0, e2e=2.0).kept_by(timing)
    assert not Targets(ttft=0.9).kept_by(timing)
    assert not Targets(tpot=0.9).kept_by(timing)
    assert not Targets(e2e=1.9).kept_by(timing)
    assert Targets(tpot=0.001).kept_by(TWO[1])  # no second token, no time between tokens


def test_targets_as_they_are_written():
    assert parse_targets([]) == Targets()
    assert parse_targets(["ttft:500", "e2e:2500"]) == Targets(ttft=0.5, e2e=2.5)
    for text, why in [
        ("itl:5", "is not a target"),
        ("ttft", "needs a number"),
        ("ttft:soon", "needs a number"),
        ("tpot:0", "positive number"),
        ("tpot:nan", "positive number"),
    ]:
        with pytest.raises(ValueError, match=why):
            parse_targets([text])
    with pytest.raises(ValueError, match="twice"):
        parse_targets(["ttft:1", "ttft:2"])


def test_figures_of_a_run():
    outcomes = [*TWO, Failure("timeout", "late"), Failure("http_429", "full"), Failure("timeout", "late too")]
    found = load_figures(outcomes, 20.0, Targets(ttft=0.6))
    assert found["answered_requests"] == 2
    assert found["failed_requests"] == 3
    assert (found["failed_timeout"], found["failed_http_429"]) == (2, 1)
    assert found["answered_requests"] + found["failed_requests"] == len(outcomes)
    assert found["requests_per_s"] == 0.1
    assert (found["input_tokens"], found["output_tokens"]) == (40, 4)
    assert (found["input_tokens_per_s"], found["output_tokens_per_s"]) == (2.0, 0.2)
    assert found["cached_share"] == 0.5
    assert found["goodput_requests_per_s"] == 0.05  # one of five, in 20 s
    assert found["good_share"] == 0.2
    assert found["send_delay_ms_p99"] == pytest.approx(247.5)


def test_what_was_not_asked_or_not_told_is_no_figure():
    found = load_figures([Timing(0.0, 0.0, [1.0], 1, 5, None)], 1.0, Targets())
    assert not {"goodput_requests_per_s", "good_share", "cached_share"} & set(found)
    assert cached_share([]) is None


def test_servers_that_tell_of_some_requests_only():
    told = Timing(0.0, 0.0, [1.0], 1, 8, 4)
    assert cached_share([told, Timing(0.0, 0.0, [1.0], 1, 100, None)]) == 0.5


def test_a_slow_client_is_doubted():
    assert doubts({"client_lag_ms_p99": 9.0, "tpot_ms_p50": 100.0, "client_busy_share": 0.5}) == []
    [lag] = doubts({"client_lag_ms_p99": 11.0, "tpot_ms_p50": 100.0})
    assert "up to 11.0 ms late" in lag
    assert doubts({"client_lag_ms_p99": 5.0, "tpot_ms_p50": 10.0})  # a fifth of a gap is 2 ms
    assert doubts({"client_lag_ms_p99": 11.0})
    [busy] = doubts({"client_busy_share": 0.95})
    assert "busy 95%" in busy


def test_spread_over_runs():
    assert over_runs([{"a": 3.0}, {"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {
        "a": Spread(2.0, 1.0, 3.0),
        "b": Spread(5.0, 5.0, 5.0),
    }
