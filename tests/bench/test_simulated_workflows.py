"""Workflows on simulated engines: small siblings of the stored figures."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench import simulated_workflows
from bench.simulated_workflows import FloorCase, Parts, PlayedCase, Setting, shown
from bench.simulations import Case, Simulations, Unknown
from bench.workflows import applications as apps
from bench.workflows import parrot, tokens
from bench.workflows.floor import POOLS, Floor, FloorEngines, floor_of
from bench.workflows.played import (
    CONTENDERS,
    PlayedRun,
    cluster_of,
    engine_settings,
    least,
    play,
    player_of,
    shrunk,
)
from bench.workflows.shapes import SHAPES, workload
from weft.core.cost.model import StepShape
from weft.sim.cluster import SimulatedCall, SimulatedCluster
from weft.sim.devices import Device, find_device, linear_forward
from weft.sim.workflow_run import SpelledPrompts
from weft.worker.build import STEP_TOKENS
from weft.workflow.graph import graph_from_dict
from weft.workflow.run.settings import NO_PLANS, PlanSettings

SCALE = 2
RESULTS = Path(simulated_workflows.__file__).parent / "results"
STORED = RESULTS / "simulated-workflows.json"
REAL = RESULTS / "workflows-distinct-epyc-avx512-2-cores.json"


def device(kv_tokens: int) -> Device:
    return msgspec.structs.replace(shrunk(find_device("qwen3-8b-h100"), SCALE), kv_tokens=kv_tokens)


def played(
    contender: str, name: str, *, rows: int = 4, kv_tokens: int = 16_000, engines: int = 2, distinct: bool = True
) -> tuple[PlayedRun, Floor]:
    work = workload(name, SCALE, num_rows=rows, duplicates=not distinct)
    found = play(work, CONTENDERS[contender], device(kv_tokens), engines, scale=SCALE)
    return found, least(work, device(kv_tokens), engines)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_all_contenders_make_the_same_calls_within_the_bounds(contender: str) -> None:
    found, floor = played(contender, "debate_mmlu", rows=2)
    assert found.calls == 6 * 2
    assert floor.seconds is not None
    assert found.seconds >= floor.seconds
    assert found.prefill_tokens >= floor.minimum
    assert 0.0 < found.hit_rate < 1.0
    assert found.busy_share <= 1.0
    again, _ = played(contender, "debate_mmlu", rows=2)
    assert again == found  # the digest of all steps too


def test_equal_calls_are_made_once_by_who_merges() -> None:
    calls = {name: played(name, "map_reduce_mmlu", rows=1, distinct=False)[0].calls for name in CONTENDERS}
    assert calls == {name: 8 if contender.merges else 15 for name, contender in CONTENDERS.items()}


def test_one_row_after_the_other_is_slowest() -> None:
    one_by_one, _ = played("query-wise", "debate_mmlu")
    assert one_by_one.seconds > 2 * played("clients", "debate_mmlu")[0].seconds


class OfOneRun(SpelledPrompts):
    """Prompts that share nothing with those of other runs."""

    def __init__(self, number: int):
        super().__init__(names_roles=True)
        self._first = chr(0x4E00 + number)

    def chat(self, messages: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
        return self._first + super().chat(messages, request)[1:]


def test_conversations_of_earlier_runs_take_no_room_from_those_in_progress() -> None:
    setting, clients = Setting("debate_mmlu", False, engines=1, measured=True), CONTENDERS["clients"]
    work = workload(setting.name, 8, 60, duplicates=False)
    settings = setting.engine_settings(clients.policy)
    floor = least(work, setting.device(), 1, settings, setting.prompts)
    device = setting._replace(kv_tokens=floor.pool_tokens(1.25)).device()
    cluster = cluster_of(clients, device, settings, [[]])
    computed = [0]
    for number in range(4):
        player_of(work, clients, device, settings, cluster, prompts=OfOneRun(number)).begin()
        cluster.run()
        computed.append(cluster.engines[0].scheduler.stats().prefill_tokens)
    assert (np.diff(computed) <= 1.01 * floor.minimum).all(), "the pool holds all of one run"


@pytest.mark.parametrize("number", range(8))
def test_the_trie_is_counted_as_one_by_one(number: int) -> None:
    source = random.Random(number)
    calls = [([source.randrange(3) for _ in range(source.randrange(1, 7))], [source.randrange(3)] * source.randrange(4))
             for _ in range(source.randrange(1, 20))]  # fmt: skip
    assert tokens.count(calls) == one_by_one(calls)


def one_by_one(calls: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tokens.TrieTokens:
    """The trie, node by node."""
    children: dict[tuple[int, int], int] = {}
    decoded: set[int] = set()
    for prompt, output in calls:
        node = 0
        for token in prompt:
            node = children.setdefault((node, token), len(children) + 1)
        for token in output:
            node = children.setdefault((node, token), len(children) + 1)
            decoded.add(node)
    return tokens.TrieTokens(len(children), len(children) - len(decoded))


def test_the_lower_bound_by_hand() -> None:
    raw = {"version": 1, "inputs": [], "outputs": {"b": "b"},
           "nodes": [{"id": "a", "op": "llm", "prompt": "x", "max_tokens": 3},
                     {"id": "b", "op": "llm", "prompt": "{{a}}", "max_tokens": 2}]}  # fmt: skip
    forward = linear_forward(0.010, 0.001, 0.0001)
    calls = {(0, "a"): ([1, 2, 3, 4], [7, 7, 7]), (0, "b"): ([1, 2, 3, 4, 7, 7, 7, 9], [5, 5])}
    found = floor_of(graph_from_dict(raw), calls, FloorEngines(forward, 1000, 2, 100))
    assert (found.trie, found.minimum, found.longest) == (10, 5, 10)
    # 5 tokens of prompts and 3 that decode, in two steps of two rows; decoding reads 5, 6 and 9 entries.
    assert found.work_s == pytest.approx(2 * 0.010 + 8 * 0.001 + 20 * 0.0001)
    # Alone: five steps of one token, which read 4, 5 and 6, then 8 and 9 entries.
    assert found.path_s == pytest.approx(5 * 0.011 + 32 * 0.0001)
    assert found.seconds == found.path_s
    assert floor_of(graph_from_dict(raw), calls, None).seconds is None


@pytest.mark.parametrize("changes", [{"branches": 4}, {"rounds": 4}])
def test_trading_grows(changes: dict[str, int]) -> None:
    usual, other = workload("trading", 16, num_rows=2), workload("trading", 16, num_rows=2, **changes)
    per_branch = 4 + 1 + 3 + 2
    expected = {"branches": 88 - 4 * per_branch, "rounds": 88 + 2 * 2 + 8 * 2 * 2}
    assert len(usual.graph.nodes) == 88
    assert len(other.graph.nodes) == expected[next(iter(changes))]


def test_parts_are_found_from_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_workflows, "workload", lambda name, scale, **options: workload(name, 32, **options))
    monkeypatch.setattr(Setting, "work", lambda self: workload(self.name, 32, num_rows=2, duplicates=self.merged))
    simulations = Simulations(tmp_path / "found.json", module="bench.simulated_workflows")
    parts = Parts(simulations, ["debate_mmlu"])
    with pytest.raises(Unknown) as unknown:
        parts.helium()
    cases = unknown.value.cases
    assert {type(case) for case in cases} == {FloorCase, PlayedCase}
    simulations.make(cases, 1)
    found = parts.helium()
    assert found["mean, distinct"]["clients"]["gain"] == 1.0
    assert len(list(shown(found))) == 1 * (1 + 3) + 2 * (1 + 3)
    kept = Simulations(tmp_path / "found.json", resume=True, module="bench.simulated_workflows")
    assert Parts(kept, ["debate_mmlu"]).helium() == found


def test_the_measured_machine_is_that_of_the_real_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STEP_TOKENS["cpu", "interactivity"] == simulated_workflows.MEASURED_STEP_TOKENS
    monkeypatch.setattr(simulated_workflows, "MEASURED_CALLS", 12)
    simulations = Simulations(module="bench.simulated_workflows")
    parts = Parts(simulations, ["debate_mmlu"])
    for _ in range(2):  # the pools follow from the floors
        with pytest.raises(Unknown) as unknown:
            parts.machine()
        simulations.make(unknown.value.cases, 1)
    found = parts.machine()
    small, large = (row for name, row in found.items() if "KV" in name)
    assert large["weft"]["prefill"] <= small["weft"]["prefill"]
    assert small["weft"]["over_bound"] >= 1.0
    assert found["mean, distinct, large pool"]["clients"] == {"gain": 1.0}


def test_prompts_on_the_measured_machine_are_those_of_the_real_benchmark() -> None:
    real = json.loads(REAL.read_text())["results"]["reflect_tatqa"]["floor"]
    floor = FloorCase(Setting("reflect_tatqa", False, engines=1, measured=True)).run()
    counts = ("trie", "minimum", "longest")
    assert [floor[name] for name in counts] == [real[name] for name in counts]


@pytest.mark.parametrize("name", ["debate_mmlu", "debate_tatqa"])
def test_debates_that_do_not_fit_compute_hardly_more_than_with_all_calls_sent_at_once(name: str) -> None:
    """Few calls wait at an engine; those that go on with a conversation must not wait behind them, nor all rows begin
    where one or two fit: prompts computed were 1.14 times those of the same clients in both."""
    setting = Setting(name, False, engines=1, measured=True)
    found = FloorCase(setting).run()
    floor = Floor(*(found[field] for field in Floor._fields))
    small = setting._replace(kv_tokens=floor.pool_tokens(POOLS["small"]))
    computed = {one: PlayedCase(one, small).run()["prefill_tokens"] for one in ("weft", "clients")}
    assert floor.minimum < computed["weft"] < 1.03 * computed["clients"]


# Applications of Parrot


def test_a_chain_far_away_waits_for_the_network() -> None:
    texts = apps.Texts(0)
    seconds = {}
    for name, tried in parrot.BY_TASK["chain"].items():
        cluster = apps.cluster_of(tried.service)
        one = apps.Application(apps.chain(4, 5, texts), apps.document(4, 200, texts))
        [*found] = [apps.run_applications(cluster, [one], tried, apps.Texts(1))]
        cluster.run()
        [[seconds[name]]] = found
    low, high = apps.NETWORK_S
    assert 3 * low <= seconds["clients"] - seconds["weft"] <= 4 * high


def test_an_engine_that_is_held_takes_documents_in_small_batches() -> None:
    def seconds(kv_tokens: int | None) -> float:
        texts = apps.Texts(0)
        tried = apps.Tried(apps.Service(apps.A100, kv_tokens=kv_tokens))
        cluster = apps.cluster_of(tried.service)
        one = apps.Application(apps.map_reduce(8, 40, texts), apps.document(8, 300, texts))
        found = apps.run_applications(cluster, [one], tried, apps.Texts(1))
        cluster.run()
        return found[0]

    assert seconds(800) > 1.5 * seconds(None)


def test_users_of_one_application_share_its_prompt() -> None:
    def tokens_computed(service: apps.Service) -> int:
        cluster = apps.cluster_of(service)
        apps.add_application_users(cluster, 4.0, 12, apps.Texts(0))
        cluster.run()
        return sum(engine.scheduler.stats().prefill_tokens for engine in cluster.engines)

    none, blind, weft = (
        tokens_computed(service._replace(engines=2))
        for service in (parrot.BY_TASK["users"][name].service for name in ("no sharing", "least queue", "weft"))
    )
    assert weft < blind < none


def test_requests_of_chat_have_times() -> None:
    cluster = apps.cluster_of(apps.Service(apps.A6000, 2))
    times = apps.add_chat(cluster, 2.0, 10, apps.Texts(0))
    cluster.run()
    figures = times.figures()
    alone_s = find_device(apps.A6000).forward.predict_s(StepShape.decodes(1, 0))
    assert figures["requests"] == 10
    assert figures["per_token_s"] > figures["tpot_s"] >= alone_s


ON_MACHINE = Setting("map_reduce_mmlu", False, engines=1, kv_tokens=4208, measured=True)


@pytest.mark.parametrize(
    "case",
    [
        parrot.ApplicationCase("chain", "weft", (2048.0, 50.0)),
        PlayedCase("clients", ON_MACHINE),
        PlayedCase("weft", ON_MACHINE),
    ],
    ids=lambda case: case.key,
)
def test_the_stored_result_is_of_this_code(case: Case) -> None:
    """Of its simulations, some of the cheapest are made again: without plans, with a cache that is short, with both."""
    stored = json.loads(STORED.read_text())
    assert case.run() == stored["simulations"][case.key]


def test_every_shape_has_settings() -> None:
    assert all(str(Setting(name, True)).startswith(name) for name in SHAPES)
    assert engine_settings(max_running=3).max_running == 3


def test_objectives_of_calls_are_deduced_from_that_of_the_output() -> None:
    """Of a summary that somebody waits for, the parts are wanted together and the last call is for latency."""
    service = apps.Service(apps.A6000, 2, routes=True)
    for planning, expected in ((NO_PLANS, {"latency"}), (PlanSettings(), {"throughput", "latency"})):
        texts, cluster = apps.Texts(0), apps.cluster_of(service)
        calls = _noted_calls(cluster)
        one = apps.Application(apps.map_reduce(3, 5, texts), apps.document(3, 60, texts))
        tried = apps.Tried(service, apps.Client(True, "latency", planning=planning))
        apps.run_applications(cluster, [one], tried, apps.Texts(1))
        cluster.run()
        assert {each.objective for each in calls} == expected
        assert calls[-1].objective == "latency"
        assert all((each.replica is None) is (planning == NO_PLANS) for each in calls)


def _noted_calls(cluster: SimulatedCluster) -> list[SimulatedCall]:
    """The calls that the cluster gets from now on."""
    calls, call = [], cluster.call

    def noting(one: SimulatedCall, *told: Any) -> int:
        calls.append(one)
        return call(one, *told)

    cluster.call = noting  # type: ignore[method-assign]
    return calls
