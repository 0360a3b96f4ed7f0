"""Cases of days, with few sessions."""

from __future__ import annotations

import pytest

from bench import simulated_days
from bench.simulated_days import STRIDE, DayCase, JobCase, coarse_device
from tests.sim.test_given_service import SMALL
from weft.core.cost.model import StepShape
from weft.sim.agents import agent_day, coarsened
from weft.sim.devices import find_device


@pytest.fixture(autouse=True)
def few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days of a few short sessions."""
    monkeypatch.setattr(
        simulated_days, "day", lambda sessions, rate, seed: coarsened(agent_day(SMALL, seed), simulated_days.STRIDE)
    )


def test_no_policy_computes_less_again_than_the_optimum() -> None:
    found = {name: DayCase(name, 0.05, 0.5, 0).run() for name in ("optimum", "bound of lru", "lru")}
    recomputed = {name: figures["recomputed_tokens"] for name, figures in found.items()}
    assert 0 < recomputed["optimum"] < recomputed["lru"] == pytest.approx(recomputed["bound of lru"], rel=0.1)
    assert len({figures["pool_tokens"] for figures in found.values()}) == 1


def test_jobs_recompute_less_with_a_host_tier() -> None:
    with_host, without = (JobCase("lru", 0.05, 0.5, 0, host).run() for host in (True, False))
    assert with_host["recomputed_tokens"] < without["recomputed_tokens"]
    assert with_host["swapped_pages"] > without["swapped_pages"] == 0
    assert with_host["mean_without_waits_s"] < with_host["mean_s"] < with_host["last_s"]


def test_a_coarse_step_takes_the_time_of_many() -> None:
    one, coarse = find_device("gptj-6b-a100").costs(), coarse_device(10_000).costs()
    decode, chunk = StepShape.decodes(1, 100), StepShape.chunk(1000)
    per_token_s = one.predict_forward_s(StepShape.chunk(3)) - one.predict_forward_s(StepShape.chunk(2))
    assert coarse.predict_forward_s(decode) == pytest.approx(
        STRIDE * one.predict_forward_s(decode) - (STRIDE - 1) * per_token_s
    )
    added = coarse.predict_forward_s(chunk) - coarse.predict_forward_s(decode)
    assert added == pytest.approx(one.predict_forward_s(chunk) - one.predict_forward_s(decode))
