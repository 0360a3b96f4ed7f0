"""Policies behind a slow link, on the machine of a stored result."""

from __future__ import annotations

import json

import pytest

from bench import simulated_link
from bench.interception import LINK_SHARE
from bench.simulated_link import MEASURED, LinkCase, Machine, compared, contenders, shown
from bench.simulations import Simulations

SMALL = Machine(MEASURED, 0.3, 5)
STORED = MEASURED.with_name("simulated-slow-link-epyc-zen3.json")


def test_the_machine_is_the_measured_one_with_its_slow_link() -> None:
    device = SMALL.device(100)
    assert device.num_pages == 100
    assert device.saturation_tokens == 36
    costs = device.costs()
    again_s = device.forward.tokens_s(72) - device.forward.tokens_s(36)
    out_s, in_s = (costs.predict_swap_s(*pages) for pages in ((101, 0), (0, 101)))
    assert out_s is not None
    assert in_s is not None
    assert (out_s + in_s) / (101 * 16) / (again_s / 36) == pytest.approx(LINK_SHARE, rel=0.05)


def test_contenders_play_the_same_requests_in_the_same_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_link, "MORE_PAGES", (0, 1))
    monkeypatch.setattr(simulated_link, "TIERS", (0.0, 1.0))
    found = Simulations()
    wanted = [
        LinkCase(SMALL, policy, tier, 0, more, estimator)
        for policy, tier, estimator in contenders()
        for more in simulated_link.MORE_PAGES
    ]
    found.make(wanted, 1)
    assert len(found.known) == len(wanted)
    assert len({(case["arrived"], case["output_tokens"]) for case in found.known.values()}) == 1
    table = compared(found, SMALL, [0])
    assert list(table) == [
        "lru, tier 0",
        "lru, tier 1",
        "min_waste, tier 0",
        "min_waste, tier 1",
        "min_waste (oracle), tier 1",
    ]
    assert table["lru, tier 0"]["ratio"] == table["lru, tier 1"]["recomputed"] == 1.0
    own = [found(case)["recomputed_tokens"] for case in wanted if (case.policy, case.tier) == ("min_waste", 0.0)]
    base = [found(case)["recomputed_tokens"] for case in wanted if (case.policy, case.tier) == ("lru", 0.0)]
    assert table["min_waste, tier 0"]["recomputed"] == pytest.approx(sum(own) / sum(base))
    assert len(list(shown(table))) == len(table)


def test_the_stored_result_is_of_this_code() -> None:
    """Of its simulations, one of the cheapest is made again."""
    case = LinkCase(Machine(MEASURED, 0.08, 40), "lru", 0.0, 3, 0)
    assert case.run() == json.loads(STORED.read_text())["simulations"][case.key]
