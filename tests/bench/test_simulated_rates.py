"""The rate at a latency: between two simulated ones, and what a file keeps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import simulated_rates
from bench.simulated_rates import Simulations, between, rate_at


def arguments(file: Path, *, resume: bool = False) -> argparse.Namespace:
    return argparse.Namespace(device="gptj-6b-a100", minutes=0.05, latency=25.0, json=file, resume=resume)


def test_a_rate_lies_between_two_latencies_by_their_logarithms() -> None:
    assert between((1.0, 0.010), (2.0, 0.1), 0.010) == pytest.approx(1.0)
    assert between((1.0, 0.010), (2.0, 0.1), 0.1) == pytest.approx(2.0)
    assert between((1.0, 0.010), (2.0, 0.1), 0.0316228) == pytest.approx(1.5)


def test_steps_go_up_until_the_latency_is_exceeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[float] = []

    def latency_s(self: Simulations, contender: str, rate: float, seed: int) -> float:
        asked.append(rate)
        return 0.01 if rate < 1.5 else 0.04

    monkeypatch.setattr(Simulations, "latency_s", latency_s)
    simulations = Simulations(arguments(tmp_path / "none.json"))
    assert rate_at(simulations, "lru", 0, 0.02, 0.2) == pytest.approx(1.5)
    assert asked == [1.0, 1.2, 1.4, 1.6]


def test_a_file_has_every_simulation_and_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    found = Simulations(arguments(file)).latency_s("lru:3200", 2.0, 0)
    assert json.loads(file.read_text())["simulations"].keys() == {"lru:3200 2 0"}
    monkeypatch.setattr(simulated_rates, "simulate", None)
    assert Simulations(arguments(file, resume=True)).latency_s("lru:3200", 2.0, 0) == found
