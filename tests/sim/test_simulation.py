"""Whole simulations, small enough to be followed by hand, and their digests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.small import session, small_device, small_settings
from weft.abi.errors import ConfigError
from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.core.step import Step
from weft.sched.in_flight import InFlight
from weft.sched.scheduler import Scheduler, SchedulerConfig
from weft.sim.clock import VirtualClock
from weft.sim.devices import find_device
from weft.sim.loop import Simulation
from weft.sim.policies import make_scheduler
from weft.sim.records import KnownTokens
from weft.sim.run import SimulationSettings, simulate, worker_spec
from weft.sim.scripts import SessionScript, TokenSource, TurnScript
from weft.sim.sessions import SessionPlayer
from weft.sim.worker import CostModelWorker, StepTiming
from weft.sim.workloads import INTERCEPTIONS, MixtureParameters, mixture

ROOT = Path(__file__).parents[2]
PROGRAMS, CLIENTS = small_settings(driving="programs"), small_settings(driving="clients")


def test_a_request_takes_the_time_of_its_steps() -> None:
    [record] = simulate(small_device(), [session(1, (100, 5, 0.0), arrive_s=2.0)], PROGRAMS).records
    # Chunks of S = 64 and 36 tokens, the second of which gives the first token; then four steps of one token.
    first_s = 2.0 + (0.01 + 0.064) + (0.01 + 0.036)
    [turn] = record.turns
    assert turn.first_token_s == pytest.approx(first_s)
    assert record.end_s == pytest.approx(first_s + 4 * 0.011)
    assert record.latency_per_token_s == pytest.approx((first_s - 2.0 + 4 * 0.011) / 5)


def test_a_newcomer_is_in_the_step_after_next() -> None:
    scripts = [session(1, (10, 50, 0.0)), session(2, (20, 1, 0.0), arrive_s=0.025)]
    newcomer = simulate(small_device(), scripts, PROGRAMS).records[1]
    # Steps end at 0.020, 0.031 and 0.042. The newcomer comes during the second one, when the third is decided already.
    assert newcomer.turns[0].first_token_s == pytest.approx(0.042 + 0.010 + 0.021)
    alone = simulate(small_device(), scripts, small_settings(overlap=False)).records[1]
    assert alone.turns[0].first_token_s == pytest.approx(0.031 + 0.010 + 0.021)


@pytest.mark.parametrize("settings", [PROGRAMS, CLIENTS])
def test_a_return_goes_on_where_its_context_ended(settings: SimulationSettings) -> None:
    done = simulate(small_device(), [session(1, (100, 5, 3.0), (20, 5, 0.0))], settings)
    [record] = done.records
    first, second = record.turns
    assert second.due_s == pytest.approx(first.end_s + 3.0)
    assert record.tools_s == pytest.approx(3.0)
    assert (first.prompt_tokens, second.prompt_tokens, second.known_tokens) == (100, 125, 104)
    # What is computed: the last token generated, which has no KV yet, and 20 new ones.
    assert done.summary.recomputed_tokens == 0
    assert second.first_token_s - second.due_s == pytest.approx(0.010 + 0.001 * 21)


def test_a_pool_that_is_too_small_makes_returns_compute_again() -> None:
    scripts = [session(number, (200, 20, 5.0), (10, 10, 0.0)) for number in range(1, 9)]
    roomy = simulate(small_device(200), scripts, PROGRAMS).summary
    tight = simulate(small_device(40), scripts, PROGRAMS).summary
    assert roomy.recomputed_tokens == 0
    assert tight.recomputed_tokens > 4 * 200
    assert tight.completed == roomy.completed == 8


def test_a_host_tier_moves_pages_instead() -> None:
    scripts = [session(number, (200, 20, 5.0), (10, 10, 0.0)) for number in range(1, 9)]
    summary = simulate(small_device(40), scripts, small_settings(host_tokens=16 * 200)).summary
    without = simulate(small_device(40), scripts, PROGRAMS).summary
    assert summary.swapped_pages > 8
    assert summary.recomputed_tokens < without.recomputed_tokens / 2


def test_a_parent_waits_for_its_subagents_one_after_the_other() -> None:
    children = tuple(SessionScript(number, "sub", 0.0, (TurnScript(64, 5),), 64) for number in (2, 3))
    turns = (TurnScript(30, 5, "subagents", 0.05, children), TurnScript(10, 5))
    done = simulate(small_device(), [SessionScript(1, "main", 0.0, turns)], CLIENTS)
    parent, first, second = done.records
    assert first.arrive_s == pytest.approx(parent.turns[0].end_s)
    assert second.arrive_s == first.end_s
    assert parent.turns[1].due_s == second.end_s
    # The shared prompt was computed by the first one, and all of it is found but the one token that has to be computed.
    assert [record.turns[0].known_tokens for record in (first, second)] == [0, 64]
    assert done.summary.recomputed_tokens == 1


def test_a_session_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"105 tokens.*64 tokens of KV"):
        simulate(small_device(4), [session(1, (100, 5, 0.0))], PROGRAMS)


def test_policies_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'fifo'.*lru"):
        simulate(small_device(), [], SimulationSettings(policy="fifo"))


class Integrity:
    """Checks the cache at every step."""

    def __init__(self, scheduler: Scheduler, cache: KVCache):
        self.scheduler = scheduler
        self.cache = cache
        self.steps = 0

    def observe(self, step: Step, flight: InFlight, timing: StepTiming) -> None:
        self.steps += 1
        check_integrity(self.cache, [sequence.table for sequence in self.scheduler.sequences])


@pytest.mark.parametrize(
    ("policy", "host_tokens"), [("lru", 0), ("lru", 1_600), ("budgeted_swap", 1_600), ("budgeted_heuristic", 1_600)]
)
def test_the_cache_is_intact_after_every_step(policy: str, host_tokens: int) -> None:
    device, settings, clock = small_device(60), small_settings(host_tokens=host_tokens), VirtualClock()
    spec = worker_spec(device, settings, 512)
    cache = KVCache(spec.num_device_pages, spec.num_host_pages, spec.page_size)
    config = SchedulerConfig(max_context=512, max_running=8, max_step_tokens=96, vocab_size=spec.vocab_size)
    scheduler = make_scheduler(policy, config, cache)
    integrity = Integrity(scheduler, cache)
    simulation = Simulation(scheduler, CostModelWorker(spec, device.costs(), clock), clock, [integrity])
    player = SessionPlayer(simulation, TokenSource(0, spec.vocab_size), KnownTokens(), driving="programs")
    turns = ((200, 20, 0.5), (10, 30, 0.2), (40, 10, 0.0))
    player.add(session(number, *turns, arrive_s=0.1 * number) for number in range(1, 13))
    simulation.run()
    assert all(record.end_s is not None for record in player.records)
    assert (cache.tiers.num_evicted > 100, integrity.steps > 100) == (True, True)
    assert cache.num_available == spec.num_device_pages


# Digests

DEVICE = "gptj-6b-a100"
DIGEST = """
from tests.sim.test_simulation import mixture_digest
print(mixture_digest(3, "{driving}"))
"""


def mixture_digest(seed: int, driving: str) -> str:
    device = find_device(DEVICE, kv_tokens=6_000)
    kinds = {name: INTERCEPTIONS[name] for name in ("math", "qa")}
    scripts = mixture(MixtureParameters(rate=8.0, minutes=0.02, kinds=kinds), seed)
    settings = SimulationSettings(driving=driving, host_tokens=4_000)  # type: ignore[arg-type]
    return simulate(device, scripts, settings, seed=seed, with_digest=True).digest


@pytest.mark.parametrize("driving", ["programs", "clients"])
def test_equal_seeds_give_equal_schedules_in_every_process(driving: str) -> None:
    here = mixture_digest(3, driving)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DIGEST.format(driving=driving)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == here
    assert mixture_digest(4, driving) != here
