"""What a profiler measures: on a fake worker, whose steps cost what a function says; once on a real one, for form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft.core.cost.model import StepShape
from weft.core.cost.profile import Identity, make_profile
from weft.core.step import ForwardBatch, Step
from weft.testing.fake_worker import FakeWorker, fake_spec
from weft.worker.executor import TorchWorker
from weft.worker.profile import FULL, QUICK, Effort, Profiler, make_plan

IDENTITY = Identity(model="m", dtype="d", device="d", threads=1, page_size=16, kernels=[], software=[])
TINY = Effort(1, 1, False, 2, 64)


def forward_s(batch: ForwardBatch) -> float:
    shape = StepShape.of(batch)
    attention = 2e-6 * shape.decode_kv + 3e-6 * shape.chunk_kv + 1e-8 * shape.chunk_pairs
    return max(0.032, 0.001 * shape.num_tokens) + 5e-5 * shape.num_outputs + attention


def device_s(step: Step) -> float:
    seconds = forward_s(step.forward) if step.forward is not None else 0.0
    for pairs, base, each in ((step.swap_outs, 0.001, 1e-4), (step.swap_ins, 0.002, 2e-4)):
        seconds += base + each * len(pairs) if len(pairs) else 0.0
    return seconds


@pytest.mark.parametrize("effort", [QUICK, FULL], ids=["quick", "full"])
def test_the_right_model_comes_out(effort: Effort) -> None:
    worker = FakeWorker(fake_spec(num_host_pages=64), device_s)
    profile = make_profile(IDENTITY, "m", Profiler(worker).measure(make_plan(worker.spec, 512, effort)))
    assert profile.errors[0].p90 < 1e-6
    assert {one.kind for one in profile.errors} == {"all", "chunk", "decode", "mixed", "prompts", "moves"}
    assert profile.errors[-1].p90 < 1e-6
    assert profile.forward.knots == (32,)
    assert profile.saturation_tokens == 29
    assert profile.max_tokens == 512
    out, back = profile.swap_out.model, profile.swap_in.model
    assert out is not None
    assert back is not None
    assert (out.base_s, out.per_page_s) == (pytest.approx(0.001), pytest.approx(1e-4))
    assert (back.base_s, back.per_page_s) == (pytest.approx(0.002), pytest.approx(2e-4))

    for beside, alone in ((profile.moves.beside_out, out), (profile.moves.beside_in, back)):
        assert beside is not None
        assert (beside.base_s, beside.per_page_s) == (pytest.approx(alone.base_s), pytest.approx(alone.per_page_s))


def test_a_link_that_works_beside_the_forward_lengthens_no_step() -> None:
    """As on a device with a link of its own: a step takes as long as the longer of the two."""

    def overlapped(step: Step) -> float:
        link_s = device_s(Step(0, swap_outs=step.swap_outs, swap_ins=step.swap_ins))
        return max(forward_s(step.forward) if step.forward is not None else 0.0, link_s)

    worker = FakeWorker(fake_spec(num_host_pages=200, num_device_pages=600), overlapped)
    costs = make_profile(IDENTITY, "m", Profiler(worker).measure(make_plan(worker.spec, 512, QUICK))).cost_model()
    shape = StepShape.decodes(8, 800)
    assert costs.predict_step_s(shape, 20, 20) == pytest.approx(costs.predict_forward_s(shape))
    # The link brings in a page in 0.2 ms, after 3 ms for both directions; 3 % of 34 ms are beyond the forward.
    seconds = 1.03 * costs.predict_forward_s(shape) - 0.003
    assert costs.free_pages(shape, 0.03) == int(seconds / 2e-4)


@pytest.mark.parametrize("effort", [QUICK, FULL], ids=["quick", "full"])
def test_pages_that_move_beside_a_forward_are_none_of_its_own(effort: Effort) -> None:
    steps: list[Step] = []

    def noted(step: Step) -> float:
        steps.append(step)
        return device_s(step)

    worker = FakeWorker(fake_spec(num_host_pages=40), noted)
    measured = Profiler(worker).measure(make_plan(worker.spec, 128, effort))
    together = [step for step in steps if step.forward is not None and len(step.swap_outs) + len(step.swap_ins)]
    assert {(len(one.swap_outs) > 0, len(one.swap_ins) > 0) for one in together} == {(1, 0), (0, 1), (1, 1)}
    for one in together:
        assert one.forward is not None
        moved = np.concatenate((one.swap_outs[:, 0], one.swap_ins[:, 1]))
        assert not np.isin(moved, one.forward.kv_page_ids).any()
        assert len(np.unique(moved)) == len(moved)
    kinds = {(sample.num_out > 0, sample.num_in > 0) for sample in measured.moves}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert max(sample.num_out + sample.num_in for sample in measured.moves) == 40


def test_a_disturbed_round_does_not_count() -> None:
    steps = 0

    def disturbed(step: Step) -> float:
        nonlocal steps
        steps += 1
        return device_s(step) * (1 if steps % 7 else 5)

    worker = FakeWorker(fake_spec(), disturbed)
    profile = make_profile(IDENTITY, "m", Profiler(worker).measure(make_plan(worker.spec, 512, FULL)))
    assert profile.errors[0].p90 < 0.01


def test_a_shape_is_measured_again_until_two_times_agree() -> None:
    random = np.random.default_rng(0)
    worker = FakeWorker(fake_spec(), lambda step: device_s(step) * max(1.0, random.uniform(0.2, 3.0)))
    plan = make_plan(worker.spec, 64, QUICK._replace(most_rounds=100))
    told: list[tuple[int, int]] = []
    profile = make_profile(IDENTITY, "m", Profiler(worker).measure(plan, lambda *one: told.append(one)))
    assert profile.errors[0].p90 < 0.02
    assert plan.num_visits < told[-1][0] == told[-1][1]


def test_progress_reaches_its_end() -> None:
    worker = FakeWorker(fake_spec(num_host_pages=8), device_s)
    plan = make_plan(worker.spec, 128, TINY)
    told: list[tuple[int, int]] = []
    Profiler(worker).measure(plan, lambda done, total: told.append((done, total)))
    assert told == [(done, plan.num_visits) for done in range(plan.num_visits + 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_device_pages": 2, "max_context": 32},
        {"num_device_pages": 9, "num_slots": 1},
        {"page_size": 8, "max_context": 100},
        {"num_host_pages": 1, "max_context": 200},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_step_tokens", [1, 7, 300])
def test_workers_of_odd_sizes(changes: dict[str, object], max_step_tokens: int) -> None:
    """The fake worker raises where a row reads or writes what is not its lane's."""
    worker = FakeWorker(fake_spec(**changes), device_s)
    plan = make_plan(worker.spec, max_step_tokens, QUICK)
    measured = Profiler(worker).measure(plan)
    assert all(sample.shape.num_tokens <= max_step_tokens for sample in measured.forwards)
    assert len(measured.swap_outs) == len(plan.swap_pages)


def test_a_real_worker_takes_every_step(make_worker: Callable[..., TorchWorker]) -> None:
    worker = make_worker()
    measured = Profiler(worker).measure(make_plan(worker.spec, 64, TINY))
    assert {sample.kind for sample in measured.forwards} == {"chunk", "decode", "mixed", "prompts"}
    assert all(sample.seconds > 0 for sample in measured.forwards)
    assert [sample.num_pages for sample in measured.swap_ins] == [1, 2, 4, 6]
