"""Every benchmark once, small: what it reports is structure and counts; times are whatever they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.server.conftest import RunningServer, running
from weft.cli.bench.shapes import CONVERSATIONS
from weft.sim.scripts import scaled, with_subagents
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine
from weft.tokenizers.load import load_tokenizer

ENGINE = ("--num-pages", "256", "--max-running", "8")
SMALL = ("--input-len", "16", "--output-len", "3", "--runs", "2")


@pytest.fixture(scope="module")
def fake() -> Iterator[RunningServer]:
    # Prompts of random ids need more tokens than there are bytes.
    tokenizer = load_tokenizer("weft-tiny")
    engine = FakeEngine(msgspec.structs.replace(DEFAULT_INFO, vocab_size=tokenizer.vocab_size))
    with running(engine=engine, tokenizer=tokenizer) as server:
        yield server
        server.assert_nothing_left()


def run(weft, tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "result.json"
    result = weft("bench", *arguments, "--json", str(file))
    assert result.exit_code == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["benchmark"] == arguments[0]
    assert found["machine"]["usable_cores"] >= 1
    assert found["versions"]["torch"]
    assert found["command"]
    assert set(found["summary"]) == set(found["runs"])
    found["stdout"], found["stderr"] = result.stdout, result.stderr
    return found


def test_throughput_counts_what_it_did(weft, tmp_path):
    found = run(weft, tmp_path, "throughput", "--num-prompts", "4", "--shared-prefix-len", "8", *SMALL, *ENGINE)
    assert "output_tokens_per_s" in found["stdout"]
    assert len(found["runs"][""]) == 2
    for figures in found["runs"][""]:
        assert (figures["prompt_tokens"], figures["output_tokens"]) == (64, 12)
    assert found["summary"][""]["output_tokens"] == {"median": 12, "low": 12, "high": 12}


def test_random_weights_are_made_once(weft, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    arguments = ("bench", "throughput", "--random-weights", "tiny", "--num-prompts", "2", *SMALL, *ENGINE)
    first = weft(*arguments)
    assert first.exit_code == 0, first.stderr
    assert "writing random weights" in first.stderr
    assert "writing random weights" not in weft(*arguments).stderr
    assert "qwen3-0.6b" in weft("bench", "throughput", "--random-weights", "huge").stderr


def test_shared_prefix_computes_each_distinct_token_once(weft, tmp_path):
    lengths = ("--shared-prefix-len", "64", "--own-len", "8", "--output-len", "2")
    arguments = ("--num-prompts", "6", *lengths, "--runs", "2")
    found = run(weft, tmp_path, "shared-prefix", *arguments, *ENGINE)
    assert list(found["runs"]) == ["prefix cache", "no prefix cache", "without / with"]
    for figures in found["runs"]["prefix cache"]:
        assert (figures["prompt_tokens"], figures["distinct_tokens"]) == (432, 112)
        assert (figures["computed_tokens"], figures["cached_tokens"]) == (112, 320)
        assert figures["computed_per_distinct"] == 1
    for figures in found["runs"]["no prefix cache"]:
        assert (figures["computed_tokens"], figures["cached_tokens"]) == (432, 0)
    for with_cache, without, ratio in zip(*found["runs"].values(), strict=True):
        assert ratio["seconds_ratio"] == pytest.approx(without["seconds"] / with_cache["seconds"])
    alone = run(weft, tmp_path, "shared-prefix", *arguments, "--no-compare", *ENGINE)
    assert list(alone["runs"]) == ["prefix cache"]


@pytest.mark.slow
def test_latency_of_each_batch_size(weft, tmp_path):
    found = run(weft, tmp_path, "latency", "--batch-size", "1", "--batch-size", "3", *SMALL, *ENGINE)
    assert list(found["runs"]) == ["batch size 1", "batch size 3"]
    wanted = {f"{name}_ms_{part}" for name in ("ttft", "tpot", "itl", "e2e") for part in ("mean", "p50", "p95", "p99")}
    assert all(wanted <= set(figures) for runs in found["runs"].values() for figures in runs)
    assert "output_tokens_per_s" in found["stdout"]


class TestServe:
    def test_a_sweep_accounts_for_every_request(self, weft, tmp_path, fake):
        found = run(
            weft,
            tmp_path,
            *("serve", "--base-url", fake.url, "--num-prompts", "9", *SMALL),
            *("--request-rate", "500", "--request-rate", "inf", "--slo", "e2e:1e9", "--slo", "ttft:1e9"),
        )
        assert list(found["runs"]) == ["rate 500", "rate inf"]
        for figures in (figures for runs in found["runs"].values() for figures in runs):
            assert (figures["answered_requests"], figures["failed_requests"]) == (9, 0)
            assert (figures["input_tokens"], figures["output_tokens"]) == (9 * 16, 9 * 3)
            assert figures["good_share"] == 1
            assert figures["goodput_requests_per_s"] == pytest.approx(figures["requests_per_s"])
            assert figures["requests_per_s"] == pytest.approx(9 / figures["seconds"])
            for name in ("ttft", "tpot", "itl", "e2e", "send_delay"):
                assert {f"{name}_ms_{part}" for part in ("mean", "p50", "p90", "p95", "p99")} <= set(figures)
            assert "client_busy_share" in figures
        assert found["subject"]["model"] == "fake-model"
        assert "rate 500" in found["stdout"]

    def test_a_target_that_nobody_keeps(self, weft, tmp_path, fake):
        found = run(weft, tmp_path, "serve", "--url", fake.url, "--num-requests", "3", "--slo", "e2e:0.0001", *SMALL)
        assert all(figures["goodput_requests_per_s"] == 0 for figures in found["runs"][""])

    def test_a_closed_loop_over_chats(self, weft, tmp_path, fake):
        found = run(
            weft,
            tmp_path,
            *("serve", "--base-url", fake.url, "--endpoint", "chat", "--num-prompts", "5", "--max-concurrency", "2"),
            *("--no-ignore-eos", *SMALL),
        )
        assert all(figures["answered_requests"] == 5 for figures in found["runs"][""])

    def test_a_shape(self, weft, tmp_path, fake):
        arguments = ("--base-url", fake.url, "--dataset", "chat-search", "--scale", "0.02", "--num-prompts", "4")
        found = run(weft, tmp_path, "serve", *arguments, "--runs", "1")
        [figures] = found["runs"][""]
        assert figures["answered_requests"] == 4
        assert figures["input_tokens"] > 4 * 123
        assert found["subject"]["dataset"] == "chat-search"

    def test_a_file(self, weft, tmp_path, fake):
        rows = [{"prompt": "abc", "max_tokens": 2}, {"prompt": [97, 98], "max_tokens": 4}, {"prompt": "d"}]
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        found = run(weft, tmp_path, "serve", "--base-url", fake.url, "--dataset", str(file), "--output-len", "5")
        assert [figures["output_tokens"] for figures in found["runs"][""]] == [11, 11, 11]
        assert any("the same in every run" in note for note in found["notes"])
        short = weft("bench", "serve", "--base-url", fake.url, "--dataset", str(file), "--num-prompts", "4")
        assert "has 3 requests and --num-prompts asks for 4" in short.stderr

    @pytest.mark.parametrize(
        ("row", "given", "wanted"),
        [
            ({"messages": [{"role": "user", "content": "hi"}]}, "completions", "chat"),
            ({"prompt": [1, 2]}, "chat", "completions"),
        ],
    )
    def test_a_file_for_the_other_endpoint(self, weft, tmp_path, row, given, wanted):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row))
        result = weft("bench", "serve", "--dataset", str(file), "--endpoint", given)
        assert result.exit_code == 1
        assert f"give --endpoint {wanted}" in result.stderr

    def test_failures_are_counted_by_kind_and_shown(self, weft, tmp_path, fake):
        rows = [{"prompt": "abc"}, {"prompt": "abc", "temprature": 1}, {"prompt": "abc", "n": 0}]
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        arguments = ("--base-url", fake.url, "--dataset", str(file), "--warmup", "0", "--runs", "1")
        found = run(weft, tmp_path, "serve", *arguments)
        [figures] = found["runs"][""]
        assert (figures["answered_requests"], figures["failed_requests"], figures["failed_http_400"]) == (1, 2, 2)
        assert any("requests failed (http_400); example:" in note for note in found["notes"])
        assert "note: requests failed (http_400)" in found["stderr"]

    def test_where_nothing_works_it_fails(self, weft, fake):
        for more in ((), ("--warmup", "0")):
            result = weft("bench", "serve", "--base-url", fake.url, "--model", "nobody", "--num-prompts", "2", *more)
            assert result.exit_code == 1
            assert "http_404" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("--request-rate", "0"), "is not a rate"),
            (("--slo", "itl:5"), "is not a target"),
            (("--input-len", "many"), "is not a length"),
            (("--dataset", "nowhere"), "is neither a file"),
            (("--scale", "0.5"), "applies to published workloads"),
            (("--extra-body", "[1]"), "must be an object"),
            (("--extra-body", "{"), "is not valid JSON"),
            (("--shared-prefix-len", "128"), "must be less than"),
            (("--base-url", "http://127.0.0.1:1", "--random-weights", "tiny"), "benchmark starts"),
        ],
    )
    def test_wrong_usage_is_told_before_anything_starts(self, weft, arguments, why):
        result = weft("bench", "serve", *arguments)
        assert result.exit_code == 2
        assert why in " ".join(result.stderr.replace("│", " ").split())

    @pytest.mark.slow
    def test_a_server_of_its_own_is_started_and_stopped(self, weft, monkeypatch, tmp_path):
        monkeypatch.setenv("WEFT_DATA", str(tmp_path / "user"))
        found = run(
            weft,
            tmp_path,
            *("serve", "--num-prompts", "4", "--request-rate", "100", "--max-concurrency", "2", *SMALL, *ENGINE),
        )
        for figures in found["runs"][""]:
            assert (figures["answered_requests"], figures["output_tokens"]) == (4, 12)
        assert not (tmp_path / "user").exists()


class TestMultiTurn:
    ARGUMENTS = ("--num-conversations", "3", "--turns", "3", "--system-len", "32", "--input-len", "8", "--runs", "2")

    @pytest.mark.slow
    @pytest.mark.parametrize("cache", [True, False])
    def test_histories_are_found_again_unless_the_cache_is_off(self, weft, tmp_path, cache):
        flag = "--prefix-cache" if cache else "--no-prefix-cache"
        found = run(weft, tmp_path, "multi-turn", *self.ARGUMENTS, "--output-len", "16", flag, *ENGINE)
        assert list(found["runs"]) == ["all turns", "turn 1", "turn 2", "turn 3"]
        assert found["subject"].get("prefix cache") == (None if cache else "off")
        for run_number in range(2):
            turns = [found["runs"][title][run_number] for title in ("turn 1", "turn 2", "turn 3")]
            # The history grows by an answer of 16 and 8 new tokens.
            assert [figures["input_tokens"] for figures in turns] == [3 * 40, 3 * 64, 3 * 88]
            assert [figures["answered_requests"] for figures in turns] == [3, 3, 3]
            together = found["runs"]["all turns"][run_number]
            assert (together["answered_requests"], together["failed_requests"]) == (9, 0)
            for number, figures in enumerate(turns[1:], 1):
                # Full pages of everything before the new turn.
                least = (40 + 24 * (number - 1)) // 16 * 16 / (40 + 24 * number)
                assert (figures["cached_share"] >= least) if cache else (figures["cached_share"] == 0)

    def test_over_chats_of_a_published_shape(self, weft, tmp_path, fake):
        arguments = ("--shape", "qa", "--scale", "0.01", "--time-scale", "0", "--endpoint", "chat", "--no-ignore-eos")
        found = run(weft, tmp_path, "multi-turn", "--base-url", fake.url, "--num-conversations", "4", *arguments)
        for figures in found["runs"]["all turns"]:
            assert figures["failed_requests"] == 0
        parts = [title for title in found["runs"] if title != "all turns"]
        assert parts[0] == "turn 1"
        answered = {
            title: sum(figures["answered_requests"] for figures in runs) for title, runs in found["runs"].items()
        }
        assert answered["turn 1"] == 3 * 4
        assert answered["all turns"] == sum(answered[title] for title in parts)

    @pytest.mark.slow
    def test_the_mixture_is_played_to_its_end_and_what_the_server_counted_is_told(self, weft, tmp_path):
        arguments = ("--shape", "mixture", "--scale", "0.02", "--time-scale", "0.001", "--request-rate", "50")
        found = run(weft, tmp_path, "multi-turn", *arguments, "--num-conversations", "10", "--runs", "2", *ENGINE)
        assert found["subject"]["conversations"] == 10
        for seed, figures in enumerate(found["runs"]["all turns"]):
            sessions = scaled(CONVERSATIONS["mixture"].draw(10, 50, seed), 0.02)
            assert (figures["completed_conversations"], figures["failed_requests"]) == (10, 0)
            assert figures["answered_requests"] == sum(len(session.turns) for session in sessions)
            outputs = sum(turn.output_tokens for session in sessions for turn in session.turns)
            assert figures["output_tokens"] == outputs
            # The pool holds everything, and a turn continues the last one to the token.
            assert figures["recomputed_tokens"] == figures["server_recomputed_tokens"] == 0
            known = sum(context - 1 for session in sessions for context in list(session.contexts())[:-1])
            computed = figures["input_tokens"] * (1 - figures["cached_share"])
            assert figures["server_prefill_tokens"] == pytest.approx(computed)
            assert computed <= figures["input_tokens"] - known  # two prompts may begin with the same token
            assert 0 < figures["normalized_ms_per_token_p50"] <= figures["normalized_ms_per_token_p90"]
            assert figures["return_ttft_ms_p50"] > 0

    def test_a_shape_with_subagents(self, weft, tmp_path, fake):
        arguments = ("--shape", "coding-agent", "--scale", "0.0005", "--time-scale", "0", "--num-conversations", "2")
        found = run(weft, tmp_path, "multi-turn", "--base-url", fake.url, *arguments, "--runs", "1", "--seed", "2")
        [figures] = found["runs"]["all turns"]
        sessions = list(with_subagents(CONVERSATIONS["coding-agent"].draw(2, math.inf, 2)))
        assert len(sessions) > 2
        assert figures["completed_conversations"] == figures["conversations"] == len(sessions)
        assert figures["answered_requests"] == sum(len(session.turns) for session in sessions)

    def test_shapes_that_there_are(self, weft):
        result = weft("bench", "multi-turn", "--shape", "nobody")
        assert result.exit_code == 2
        assert "chatbot" in result.stderr
        negative = weft("bench", "multi-turn", "--shape", "mixture", "--seed", "-1")
        assert negative.exit_code == 2
        assert "negative" in negative.stderr
