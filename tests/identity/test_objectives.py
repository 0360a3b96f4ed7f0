"""In float64, tokens do not depend on objectives, nor on what is held back because of them."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.identity import Runner, random_requests, same_as_far_as_both_go, schedules
from weft.core.cost.model import CostModel
from weft.core.objectives import OBJECTIVES
from weft.sim.devices import linear_forward

OTHERS = [objective for objective in OBJECTIVES if objective != "deadline"]


@pytest.mark.parametrize("way", ["batched", "a pool that evicts and preempts"])
def test_tokens_do_not_depend_on_objectives(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*args: object) -> SimpleNamespace:
        """A device whose steps take 10 ms and 1 ms for each token, so that a few rows fit beside one."""
        model = CostModel(linear_forward(0.010, 0.001), None, None, 48)
        return SimpleNamespace(cost_model=lambda: model, saturation_tokens=48)

    monkeypatch.setattr("weft.engine.build.find_profile", profile)
    source = random.Random(7)
    plain = random_requests(14, seed=12)
    mixed = [replace(request, objective=source.choice(OTHERS)) for request in plain]
    config, together = schedules("float64")[way]
    found, steps = [], []
    for requests in (plain, mixed):
        runner = Runner(config)
        found.append(runner.run(requests, together))
        stats = runner.engine.stats()
        steps.append(stats.steps)
        assert set(stats.objective_device_s) == {request.objective for request in requests}
        assert sum(stats.objective_device_s.values()) == pytest.approx(stats.step_device_s)
        runner.close()
    assert steps[1] > steps[0], "some were held back"
    for request, expected, got in zip(plain, *found, strict=True):
        for fork in range(len(request.samplers)):
            assert same_as_far_as_both_go(request, expected.tokens[fork], got.tokens[fork])
