"""Figures and workloads as pure functions; every benchmark once, small."""

from __future__ import annotations

import json

import pytest

from weft.cli.bench.measure import Spread, Targets, Timing, latencies, over_runs, percentile
from weft.cli.bench.workload import arrivals, random_prompts

SMALL = ("--input-len", "16", "--output-len", "3", "--runs", "2", "--num-pages", "256", "--max-running", "8")


def test_percentiles_interpolate():
    assert [percentile([3, 1, 2], p) for p in (0, 50, 75, 100)] == [1, 2, 2.5, 3]
    assert percentile([7], 99) == 7


def test_latencies_of_known_times():
    timings = [Timing(0.0, [1.0, 1.5, 3.5], 3), Timing(10.0, [10.5], 1)]
    assert [timing.first_s for timing in timings] == [1.0, 0.5]
    assert timings[0].gaps_s == [0.5, 2.0]
    assert (timings[0].per_token_s, timings[1].per_token_s) == (1.25, 0.0)
    found = latencies(timings)
    assert (found["ttft_ms_p50"], found["itl_ms_p50"], found["e2e_ms_p50"]) == (750, 1250, 2000)


def test_latencies_without_a_second_token_have_no_gaps():
    assert not any(name.startswith("itl") for name in latencies([Timing(0.0, [1.0], 1)]))


def test_targets():
    timing = Timing(0.0, [1.0, 2.0], 2)
    assert Targets().kept_by(timing)
    assert Targets(first_s=1.0, per_token_s=1.0, total_s=2.0).kept_by(timing)
    assert not Targets(first_s=0.9).kept_by(timing)
    assert not Targets(per_token_s=0.9).kept_by(timing)
    assert not Targets(total_s=1.9).kept_by(timing)


def test_spread_over_runs():
    assert over_runs([{"a": 3.0}, {"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {
        "a": Spread(2.0, 1.0, 3.0),
        "b": Spread(5.0, 5.0, 5.0),
    }


def test_prompts_are_seeded_and_share_only_their_prefix():
    first = random_prompts(1, range(1000), count=4, length=20, shared_prefix=8)
    assert first == random_prompts(1, range(1000), count=4, length=20, shared_prefix=8)
    assert all(len(prompt) == 20 and prompt[:8] == first[0][:8] for prompt in first)
    assert len({tuple(prompt[8:]) for prompt in first}) == 4
    for seed in (-1, 2):
        assert random_prompts(seed, range(1000), count=1, length=20)[0][:8] != first[0][:8]


def test_arrivals():
    assert list(arrivals(0, 3, None)) == [0, 0, 0]
    times = list(arrivals(0, 2001, 4.0))
    assert times == sorted(times)
    assert times == list(arrivals(0, 2001, 4.0))
    assert times[-1] == pytest.approx(500, rel=0.1)


def test_throughput_counts_what_it_did(weft, tmp_path):
    file = tmp_path / "result.json"
    result = weft("bench", "throughput", "--num-prompts", "4", "--shared-prefix-len", "8", *SMALL, "--json", str(file))
    assert result.exit_code == 0, result.stderr
    assert "output_tokens_per_s" in result.stdout
    found = json.loads(file.read_text())
    assert found["benchmark"] == "throughput"
    assert found["machine"]["usable_cores"] >= 1
    assert found["versions"]["torch"]
    assert len(found["runs"][""]) == 2
    for run in found["runs"][""]:
        assert (run["prompt_tokens"], run["output_tokens"]) == (64, 12)
    assert found["summary"][""]["output_tokens"] == {"median": 12, "low": 12, "high": 12}


def test_random_weights_are_made_once(weft, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    arguments = ("bench", "throughput", "--random-weights", "tiny", "--num-prompts", "2", *SMALL)
    first = weft(*arguments)
    assert first.exit_code == 0, first.stderr
    assert "writing random weights" in first.stderr
    assert "writing random weights" not in weft(*arguments).stderr
    assert "qwen3-0.6b" in weft("bench", "throughput", "--random-weights", "huge").stderr


@pytest.mark.slow
def test_latency_of_each_batch_size(weft, tmp_path):
    file = tmp_path / "result.json"
    result = weft("bench", "latency", "--batch-size", "1", "--batch-size", "3", *SMALL, "--json", str(file))
    assert result.exit_code == 0, result.stderr
    found = json.loads(file.read_text())
    assert list(found["runs"]) == ["batch size 1", "batch size 3"]
    assert all({"ttft_ms_p50", "itl_ms_p99"} <= set(run) for runs in found["runs"].values() for run in runs)


@pytest.mark.slow
def test_a_server_of_its_own_is_started_and_stopped(weft, tmp_path):
    file = tmp_path / "result.json"
    arguments = ("--num-requests", "4", "--rate", "100", "--max-concurrency", "2", "--slo-e2e", "1e9")
    result = weft("bench", "serve", *arguments, *SMALL, "--json", str(file))
    assert result.exit_code == 0, result.stderr
    for run in json.loads(file.read_text())["runs"][""]:
        assert run["failed_requests"] == 0
        assert run["goodput_requests_per_s"] == pytest.approx(run["requests_per_s"])
