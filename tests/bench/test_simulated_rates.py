"""The rate at a latency, what parts ask for, and what a file keeps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import simulated_rates
from bench.simulated_rates import Parts, between, rate_at, shown
from bench.simulations import STALE, MixtureCase, Simulations, Unknown, gather

ARGUMENTS = argparse.Namespace(seeds=[0, 1], latency=25.0)
CASE = MixtureCase("lru-host", 2.0, 0.05, 0)
RESULTS = Path(simulated_rates.__file__).parent / "results"


class Noted(Simulations):
    """Of a file, with the keys that were asked for."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, resume=True)
        self.asked: set[str] = set()

    def __call__(self, case: Any) -> Any:
        self.asked.add(case.key)
        return super().__call__(case)


class Invented(Simulations):
    """Every simulation is known: requests take 10 ms per token up to 1.45 per second, and 40 ms above."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __call__(self, case: Any) -> dict[str, Any]:
        self.asked.append(case)
        if not isinstance(case, MixtureCase):
            return {"recomputed_tokens": {"lru": 100, "min_waste": 70, "optimum": 20}.get(case.policy, 90)}
        return {"latency_per_token_s": 0.01 if case.rate < 1.45 else 0.04, "completed_per_s": case.rate}


def test_a_rate_lies_between_two_latencies_by_their_logarithms() -> None:
    assert between((1.0, 0.010), (2.0, 0.1), 0.010) == pytest.approx(1.0)
    assert between((1.0, 0.010), (2.0, 0.1), 0.1) == pytest.approx(2.0)
    assert between((1.0, 0.010), (2.0, 0.1), 0.0316228) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("first", "asked"), [(1.0, [1.0, 1.2, 1.4, 1.6]), (1.4, [1.4, 1.6]), (1.8, [1.8, 1.6, 1.4, 1.6])]
)
def test_two_rates_a_step_apart_are_sought_up_and_down(first: float, asked: list[float]) -> None:
    tried: list[float] = []

    def latency_s(rate: float) -> float:
        tried.append(rate)
        return 0.01 if rate < 1.5 else 0.04

    assert rate_at(latency_s, 0.02, first, 0.2) == pytest.approx(1.5)
    assert list(dict.fromkeys(tried)) == list(dict.fromkeys(asked))


def test_a_latency_that_is_exceeded_everywhere_or_nowhere_gives_the_last_rate_tried() -> None:
    assert rate_at(lambda rate: 1.0, 0.02, 0.3, 0.1) == pytest.approx(0.1)
    assert rate_at(lambda rate: 0.0, 0.02, 7.5, 0.2) == simulated_rates.MAX_RATE


def test_all_that_is_missing_is_asked_for_together() -> None:
    def find(key: int) -> int:
        if key % 2:
            raise Unknown([CASE._replace(seed=key)])
        return key

    assert gather(find, [0, 2]) == {0: 0, 2: 2}
    with pytest.raises(Unknown) as error:
        gather(find, range(4))
    assert [case.seed for case in error.value.cases if isinstance(case, MixtureCase)] == [1, 3]


def test_a_file_has_every_simulation_and_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    simulations = Simulations(file)
    with pytest.raises(Unknown):
        simulations(CASE)
    simulations.make([CASE], jobs=1)
    found = simulations(CASE)
    assert found["completed"] == found["arrived"] > 0
    assert json.loads(file.read_text())["simulations"].keys() == {"lru-host, 2/s, 0.05 min, seed 0"}
    assert Simulations(file, resume=True)(CASE) == found


def test_a_simulation_may_end_with_the_arrivals() -> None:
    whole, cut = CASE.run(), CASE._replace(to_end=False).run()
    assert cut["simulated_s"] < 3.1 < whole["simulated_s"]
    assert cut["completed"] < whole["completed"]


def test_without_waits_no_kv_waits() -> None:
    found, other = (MixtureCase(name, 2.0, 0.05, 0).run() for name in ("no-waits-host", "lru"))
    assert found["waste_shares"]["preserve"] < 0.02 < other["waste_shares"]["preserve"]
    assert found["output_tokens"] == other["output_tokens"]


def test_parts_find_rates_at_the_latency_for_each_seed() -> None:
    found = Parts(Invented(), ARGUMENTS).rates()
    assert found.keys() == set(simulated_rates.CLAIMED)
    assert found["min_waste-host"] == pytest.approx([1.466] * 2, abs=1e-3), "between 1.4 and 1.5"
    assert found["lru"] == pytest.approx([1.532] * 2, abs=1e-3), "between 1.4 and 1.6"


def test_parts_have_the_figures_of_each_rate_and_seed() -> None:
    invented = Invented()
    found = Parts(invented, ARGUMENTS).collapse()
    assert found["min_waste-host"]["4"] == [{"completed_per_s": 4.0}] * 2
    assert {case.to_end for case in invented.asked} == {False}
    lines = list(shown(found))
    assert lines[1].split() == ["min_waste-host", "4/s", "completed_per_s", "4", "(4", "to", "4)"]


def test_days_have_the_part_of_the_gap_that_is_saved() -> None:
    found = Parts(Invented(), ARGUMENTS).days()
    assert found["0.02/s, pool 0.5"]["saved by min_waste"] == pytest.approx([30 / 80] * 2)
    assert "  0.02/s, pool 0.5             optimum                  20 (20 to 20)" in list(shown(found))


def test_a_simulation_that_is_stale_is_made_anew_and_stays_in_the_file_until_then(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"simulations": {CASE.key: {"steps": 3, STALE: "another order"}}}), "utf-8")
    simulations = Simulations(file, resume=True)
    with pytest.raises(Unknown):
        simulations(CASE)
    simulations.write({}, ["rates"])
    assert json.loads(file.read_text("utf-8"))["simulations"][CASE.key]["steps"] == 3
    simulations.make([CASE], 1)
    assert STALE not in json.loads(file.read_text("utf-8"))["simulations"][CASE.key]


@pytest.mark.parametrize(
    ("name", "parts", "seeds"),
    [
        ("simulated-gptj-6b-a100-three-seeds.json", ("rates", "waste", "collapse", "estimators"), [0, 1, 2]),
        ("simulated-gptj-6b-a100.json", simulated_rates.ALL_PARTS, [0]),
    ],
)
def test_stored_results_follow_from_the_simulations_beside_them(
    name: str, parts: tuple[str, ...], seeds: list[int]
) -> None:
    stored = json.loads((RESULTS / name).read_text("utf-8"))
    simulations = Noted(RESULTS / name)
    found = Parts(simulations, argparse.Namespace(seeds=seeds, latency=25.0))
    assert {part: json.loads(json.dumps(getattr(found, part)())) for part in parts} == stored["results"]
    assert stored["incomplete"] == []
    assert simulations.asked == stored["simulations"].keys()
