"""The comparison of policies under interceptions: its sizes, what it keeps, and one that runs on a small model."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch

from bench import interception
from bench.interception import Contender, Sizes
from weft.abi.errors import ConfigError
from weft.cli.bench.shapes import CONVERSATIONS
from weft.core.cost.fit import Sample, SwapSample
from weft.core.cost.model import StepShape
from weft.core.cost.profile import Identity, Measurements, Profile, decode_profile, encode_profile, make_profile
from weft.engine.profiles import store_profile
from weft.models.random_checkpoints import FAMILIES, QWEN3_0_6B, write_checkpoint
from weft.sim.devices import find_device, linear_forward
from weft.sim.scripts import SessionScript, TurnScript, window

SIZES = Sizes(kv_tokens=160, host_bytes=1 << 20, link_gbs=0.125, max_context=65)


def test_the_link_of_an_a100_is_that_of_an_a100() -> None:
    # GPT-J 6B: 0.0463 ms a token, 458,752 bytes of KV, 25 GB/s.
    rate = interception.link_bytes_per_s(linear_forward(0.01, 46.3e-6), 384, 458_752)
    assert rate == pytest.approx(25e9, rel=0.01)
    assert 2 * 458_752 / rate == pytest.approx(0.8 * 46.3e-6)


def test_the_link_of_a_model_whose_tokens_take_no_time_is_that_of_its_steps() -> None:
    rate = interception.link_bytes_per_s(linear_forward(0.004, 0.0), 400, 1000)
    assert 2 * 1000 / rate == pytest.approx(0.8 * 0.004 / 400)


def test_bytes_of_a_token_are_those_of_keys_and_values_of_all_layers() -> None:
    assert interception.kv_bytes_per_token(QWEN3_0_6B) == 2 * 28 * 8 * 128 * 2


def test_live_contexts_are_those_of_requests_under_way() -> None:
    # One waits for 100 s with 119 tokens of KV; another comes and goes meanwhile.
    sessions = [
        SessionScript(1, "qa", 0.0, (TurnScript(100, 20, "qa", 100.0), TurnScript(10, 5))),
        SessionScript(2, "qa", 50.0, (TurnScript(200, 30),)),
    ]
    live = interception.live_contexts(find_device("gptj-6b-a100", kv_tokens=64), sessions)
    assert live.peak == 119 + 229
    assert live.mean == pytest.approx(119, rel=0.05)


def test_all_contenders_get_the_same_requests(tmp_path: Path) -> None:
    args = interception.parse_arguments(["--rate", "0.5", "--requests", "30"])
    sessions = interception.drawn(args)
    assert sessions == interception.drawn(args)
    whole = CONVERSATIONS["mixture"].draw(30, 0.5, 0)
    assert [session.arrive_s for session in sessions] == [session.arrive_s for session in whole]
    for session, original in zip(sessions, whole, strict=True):
        for turn, before in zip(session.turns, original.turns, strict=True):
            assert turn.wait_s == before.wait_s
            assert turn.new_tokens == max(1, round(before.new_tokens / 4))
            assert turn.output_tokens == max(1, round(before.output_tokens / 4))


def test_contenders_differ_in_policy_host_tier_and_link_alone(tmp_path: Path) -> None:
    engines = {
        one.name: interception.settings_of(one, tmp_path, SIZES).config.engine
        for one in interception.CONTENDERS
        if one.policy
    }
    assert {
        name: (one.intercept_policy, bool(one.host_kv_bytes), one.host_link_gbs) for name, one in engines.items()
    } == {
        "lru": ("lru", False, None),
        "min_waste-no-host": ("min_waste", False, None),
        "lru-host": ("lru", True, 0.125),
        "discard": ("discard", True, 0.125),
        "min_waste": ("min_waste", True, 0.125),
        "lru-host-unthrottled": ("lru", True, None),
        "min_waste-unthrottled": ("min_waste", True, None),
    }
    own = SIZES._replace(link_gbs=None)
    for one in interception.CONTENDERS:
        if one.policy:
            assert interception.settings_of(one, tmp_path, own).config.engine.host_link_gbs is None
    assert {(one.num_pages, one.max_context, one.dtype) for one in engines.values()} == {(10, 65, "bfloat16")}


def test_one_action_with_nearly_all_decisions_makes_a_run_void() -> None:
    mixed = {"server_decisions_kept": 60.0, "server_decisions_recomputed": 40.0, "recomputed_tokens": 1e6}
    assert interception.void(mixed) is None
    assert interception.void({}) is None
    assert interception.void({"server_decisions_kept": 92.0, "server_decisions_host": 8.0}) == (
        "92% of decisions are kept"
    )


def test_the_summary_has_medians_extremes_and_what_is_void() -> None:
    runs = {
        "lru": [{"recomputed_tokens": value, "server_decisions_recomputed": 10.0} for value in (30.0, 10.0, 20.0)],
        "vllm": [],
    }
    lines = interception.summary(runs)
    assert lines[0] == "lru, 3 runs"
    assert any("recomputed_tokens" in line and "20.0  (10.0 to 30.0)" in line for line in lines)
    assert sum("void, run" in line for line in lines) == 3
    assert not any("vllm" in line for line in lines)


class Machine:
    """Servers and runs that measure nothing: which were asked for, and one that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ran: list[str] = []
        self.fails: dict[int, BaseException] = {}
        """By number of the run, from 1."""
        monkeypatch.setattr(interception, "server", self.server)
        monkeypatch.setattr(interception, "one_run", self.one_run)
        monkeypatch.setattr(interception, "prepare", lambda args, record, checkpoint: SIZES)
        monkeypatch.setattr(interception, "random_weights", lambda shape, report: Path("nowhere"))

    @contextlib.contextmanager
    def server(self, contender: Contender, checkpoint: Path, sizes: Sizes) -> Iterator[str]:
        if not contender.policy:
            raise ImportError("no vLLM here")
        yield contender.name

    def one_run(self, url: str, args: Any) -> interception.Measured:
        self.ran.append(url)
        if error := self.fails.get(len(self.ran)):
            raise error
        notes = ["the client is busy"] if len(self.ran) == 3 else []
        return interception.Measured({"recomputed_tokens": float(len(self.ran))}, notes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def measure(monkeypatch: pytest.MonkeyPatch, file: Path, *more: str) -> dict[str, Any]:
    arguments = ["interception", "--contenders", "lru,min_waste", "--runs", "2", "--json", str(file), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    interception.main()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_contenders_take_turns(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measure(monkeypatch, tmp_path / "out.json")
    assert machine.ran == ["lru", "min_waste", "lru", "min_waste"]
    assert found["runs"] == {
        "lru": [{"recomputed_tokens": 1.0}, {"recomputed_tokens": 3.0}],
        "min_waste": [{"recomputed_tokens": 2.0}, {"recomputed_tokens": 4.0}],
    }
    assert found["notes"] == {"lru": ["run 2: the client is busy"], "min_waste": []}
    assert found["asked"]["requests"] == 120
    assert found["machine"]["usable_cores"] >= 1


def test_servers_of_a_group_are_up_together(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    up: list[str] = []
    begun: list[list[str]] = []

    @contextlib.contextmanager
    def server(contender: Contender, checkpoint: Path, sizes: Sizes) -> Iterator[str]:
        up.append(contender.name)
        if contender.name == "lru":
            raise RuntimeError("out of memory")
        yield contender.name
        up.remove(contender.name)

    def one_run(url: str, args: Any) -> interception.Measured:
        begun.append(sorted(up))
        return interception.Measured({}, [])

    monkeypatch.setattr(interception, "server", server)
    monkeypatch.setattr(interception, "one_run", one_run)
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit):
        measure(monkeypatch, file, "--contenders", "min_waste,lru-host,lru,discard", "--together", "2", "--runs", "1")
    assert begun == [["lru-host", "min_waste"]] * 2 + [["discard", "lru"]]
    assert json.loads(file.read_text())["failed"] == {"lru": "RuntimeError: out of memory"}


def test_a_window_is_played_alone_and_has_to_lie_among_the_arrivals() -> None:
    args = interception.parse_arguments(["--rate", "2", "--requests", "200", "--window", "60:80", "--scale", "1"])
    sessions = interception.drawn(args)
    whole = CONVERSATIONS["mixture"].draw(200, 2.0, 0)
    assert sessions == window(whole, 60.0, 80.0)
    with pytest.raises(ConfigError, match="raise the number"):
        interception.drawn(interception.parse_arguments(["--rate", "2", "--requests", "20", "--window", "60:80"]))


def test_runs_before_an_interruption_are_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.fails = {4: KeyboardInterrupt()}
    file = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        measure(monkeypatch, file, "--window", "40:140")
    machine.ran.clear()
    machine.fails = {}
    found = measure(monkeypatch, file, "--window", "40:140", "--resume")
    assert machine.ran == ["min_waste"]
    assert [len(runs) for runs in found["runs"].values()] == [2, 2]
    with pytest.raises(SystemExit, match="other settings"):
        measure(monkeypatch, file, "--resume", "--rate", "0.7")


def test_a_server_that_fails_is_named_and_costs_no_other_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.fails = {1: RuntimeError("out of memory")}
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit):
        measure(monkeypatch, file)
    kept = json.loads(file.read_text())
    assert kept["failed"] == {"lru": "RuntimeError: out of memory"}
    assert (len(kept["runs"]["lru"]), len(kept["runs"]["min_waste"])) == (0, 2)


def test_a_peer_that_is_not_installed_is_left_out_with_the_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure(monkeypatch, tmp_path / "out.json", "--contenders", "vllm,lru")
    assert found["failed"] == {"vllm": "ImportError: no vLLM here"}
    assert machine.ran == ["lru", "lru"]
    assert interception.INSTALL["vllm"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--contenders", "lru,fifo"], "no such contender: fifo"),
        (["--rate", "0"], "must be positive"),
        (["--rate", "inf"], "must be positive"),
        (["--runs", "0"], "must be positive"),
        (["--seed", "-1"], "not negative"),
        (["--together", "0"], "must be positive"),
        (["--window", "80:60"], "invalid parse_window value"),
        (["--window", "now"], "invalid parse_window value"),
        (["--resume"], "--resume needs --json"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        interception.parse_arguments(arguments)
    assert why in capsys.readouterr().err


def test_a_pool_that_does_not_hold_the_longest_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = interception.parse_arguments(["--kv-tokens", "64", "--requests", "10"])
    device = find_device("gptj-6b-a100")
    monkeypatch.setattr(interception, "device_of_profile", lambda *_: device)
    with pytest.raises(SystemExit, match="does not hold the longest request"):
        interception.choose_sizes(args, cast("Profile", None), QWEN3_0_6B)


@pytest.fixture(scope="module")
def profile() -> Profile:
    rows = [StepShape.decodes(n, 100 * n) for n in range(1, 40)] + [StepShape.chunk(n) for n in range(2, 200, 5)]
    forwards = [Sample("mixed", shape, 0.03 + 0.002 * shape.num_tokens) for shape in rows]
    swaps = [SwapSample(n, 0.001 * n) for n in (1, 2, 4, 8, 16)]
    identity = Identity(
        model="a model", dtype="bfloat16", device="a device", threads=2, page_size=16, kernels=[], software=[]
    )
    return make_profile(identity, "a model", Measurements(forwards, swaps, swaps))


def test_the_profile_of_a_throttled_link_has_its_rate(profile: Profile) -> None:
    found = interception.throttled(profile, 0.125, 1000)
    costs = found.cost_model()
    assert costs.predict_swap_s(3, 4) == pytest.approx(7 * 16 * 1000 / 0.125e9)
    shape = StepShape.chunk(64)
    assert costs.predict_forward_s(shape) == profile.cost_model().predict_forward_s(shape)
    assert decode_profile(encode_profile(found)) == found
    assert found.identity.host_link == "0.125 GB/s"
    assert found.key != profile.key


def test_profiles_are_measured_once_and_again_where_servers_would_not_find_them(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    measured: list[Path] = []

    def measure(checkpoint: Path, quick: bool) -> Profile:
        measured.append(checkpoint)
        store_profile(tmp_path / "cache", profile)
        return profile

    monkeypatch.setattr(interception, "measure_profile", measure)
    (tmp_path / "config.json").write_text(json.dumps(dict(QWEN3_0_6B)))
    file = tmp_path / "out.json"
    args = interception.parse_arguments(["--requests", "10", "--kv-tokens", "4000", "--json", str(file)])
    sizes = interception.prepare(args, record := {}, tmp_path)
    assert interception.prepare(args, record, tmp_path) == sizes
    assert len(measured) == 1
    assert {one.name for one in (tmp_path / "cache" / "profiles").iterdir()} == {
        f"{one.key}.json" for one in (profile, interception.throttled(profile, sizes.link_gbs, 114_688))
    }
    recompute_s = profile.forward.predict_s(StepShape.chunk(2 * profile.saturation_tokens))
    recompute_s -= profile.forward.predict_s(StepShape.chunk(profile.saturation_tokens))
    swap_s = 2 * 114_688 / (sizes.link_gbs * 1e9)
    assert swap_s * profile.saturation_tokens == pytest.approx(0.8 * recompute_s, rel=1e-3)
    assert sizes.kv_tokens == 4000
    assert sizes.host_bytes >= record["sources"]["peak_live_tokens"] * 114_688
    # On another machine the file is there and the profile is not.
    shutil.rmtree(tmp_path / "cache")
    assert interception.prepare(args, json.loads(file.read_text()), tmp_path) == sizes
    assert len(measured) == 2


def test_a_given_profile_is_not_measured_and_servers_find_it(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(interception, "measure_profile", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "config.json").write_text(json.dumps(dict(QWEN3_0_6B)))
    (tmp_path / "profile.json").write_bytes(encode_profile(profile))
    given = ["--profile", str(tmp_path / "profile.json"), "--own-link", "--requests", "10", "--kv-tokens", "4000"]
    sizes = interception.prepare(interception.parse_arguments(given), {}, tmp_path)
    assert sizes.link_gbs is None
    assert [one.name for one in (tmp_path / "cache" / "profiles").iterdir()] == [f"{profile.key}.json"]


@pytest.mark.slow
def test_a_comparison_with_a_real_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    shape = {**FAMILIES["qwen3"], "vocab_size": 1200}  # with all ids of prompts
    checkpoint = write_checkpoint(tmp_path / "model", shape, dtype=torch.bfloat16, tokenizer=True)
    small = ("--checkpoint", str(checkpoint), "--requests", "4", "--scale", "0.02", "--time-scale", "0.001")
    more = ("--rate", "20", "--contenders", "min_waste", "--runs", "1", "--quick-profile", "--kv-tokens", "256")
    file = tmp_path / "out.json"
    metrics: list[str] = []
    one_run = interception.one_run

    def watched(url: str, args: argparse.Namespace) -> interception.Measured:
        metrics.append(httpx.get(f"{url}/metrics").text)
        return one_run(url, args)

    monkeypatch.setattr(interception, "one_run", watched)
    found = measure(monkeypatch, file, *small, *more)
    sessions = interception.drawn(interception.parse_arguments([*small, *more]))
    assert interception.stored(found["profile"]) is not None
    assert found["sizes"]["kv_tokens"] == 256
    assert found["sizes"]["max_context"] == 1 + max(session.num_tokens for session in sessions)
    assert found["sizes"]["link_gbs"] > 0
    assert found["failed"] == {}
    # The server has found the profile of its link, and has a host tier.
    assert "weft:saturation_tokens{" in metrics[0]
    [host_pages] = re.findall(r"^weft:host_kv_pages\{.*\} (\d+)", metrics[0], re.MULTILINE)
    assert int(host_pages) * 16 >= found["sources"]["peak_live_tokens"]
    [figures] = found["runs"]["min_waste"]
    assert figures["answered_requests"] == sum(len(session.turns) for session in sessions)
    assert figures["completed_conversations"] == 4
    assert {"normalized_ms_per_token_p50", "return_ttft_ms_p50", "server_recomputed_tokens"} <= set(figures)
    # A file with everything is not measured again.
    assert measure(monkeypatch, file, *small, *more, "--resume")["runs"] == found["runs"]
