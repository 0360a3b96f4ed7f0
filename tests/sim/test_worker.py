from __future__ import annotations

import numpy as np
import pytest

from tests.sim.small import small_device
from weft.abi.errors import ConfigError, Unsupported
from weft.core.cost.model import CostModel
from weft.core.step import EmbedBatch, ForwardBatch, HeadBatch, SamplingBatch, Step
from weft.sim.clock import Agenda, VirtualClock
from weft.sim.run import SimulationSettings, worker_spec
from weft.sim.worker import OUTPUT_TOKEN, CostModelWorker


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def forward(num_tokens: int, **changes: object) -> ForwardBatch:
    tokens = np.arange(num_tokens, dtype=np.int32)
    whole: dict[str, object] = {
        "token_ids": tokens,
        "positions": tokens,
        "write_slots": tokens,
        "q_indptr": ints(0, num_tokens),
        "kv_indptr": ints(0, 1),
        "kv_page_ids": ints(0),
        "kv_lens": ints(num_tokens),
    }
    return ForwardBatch(**{**whole, **changes})  # type: ignore[arg-type]


def sampling(count: int, **changes: object) -> SamplingBatch:
    whole: dict[str, object] = {
        "rows": np.zeros(count, np.int32),
        "slots": np.arange(count, dtype=np.int32),
        "uniforms": np.zeros(count),
        "num_logprobs": np.full(count, -1, np.int32),
        "suppress_stop": np.zeros(count, np.bool_),
        "late_mask": np.zeros(count, np.bool_),
    }
    return SamplingBatch(**{**whole, **changes})  # type: ignore[arg-type]


def pairs(count: int) -> np.ndarray:
    return np.arange(2 * count, dtype=np.int32).reshape(-1, 2)


def make(*, synchronous: bool = False, costs: CostModel | None = None) -> tuple[CostModelWorker, VirtualClock]:
    device, clock = small_device(), VirtualClock()
    spec = worker_spec(device, SimulationSettings(), 1024)
    return CostModelWorker(spec, costs or device.costs(), clock, synchronous_swaps=synchronous), clock


def test_pages_move_while_the_forward_runs() -> None:
    worker, _ = make()
    few = worker.launch(Step(1, swap_outs=pairs(4), swap_ins=pairs(5), forward=forward(10))).timing
    assert (few.forward_s, few.swap_s, few.device_s) == pytest.approx((0.020, 0.009, 0.020))
    many = worker.launch(Step(2, swap_outs=pairs(30), forward=forward(10))).timing
    assert (many.swap_s, many.device_s) == pytest.approx((0.030, 0.030))


def test_synchronous_swaps_lengthen_the_step() -> None:
    worker, _ = make(synchronous=True)
    timing = worker.launch(Step(1, swap_outs=pairs(4), swap_ins=pairs(5), forward=forward(10))).timing
    assert timing.device_s == pytest.approx(0.029)


def test_copies_alone_have_no_forward() -> None:
    worker, _ = make()
    assert worker.launch(Step(1, swap_ins=pairs(3))).timing.device_s == pytest.approx(0.003)
    assert worker.launch(Step(2, page_copies=pairs(3))).timing.device_s == 0.0


def test_a_step_begins_when_the_one_before_is_done() -> None:
    worker, clock = make()
    clock.move_to(1.0)
    first, second = (worker.launch(Step(number, forward=forward(10))) for number in (1, 2))
    assert (first.timing.begin_s, first.timing.end_s) == pytest.approx((1.0, 1.02))
    assert second.timing.begin_s == first.timing.end_s
    assert not first.done()
    clock.move_to(1.02)
    assert (first.done(), second.done()) == (True, False)


def test_every_sampler_gets_a_token() -> None:
    worker, _ = make()
    result = worker.launch(Step(7, forward=forward(3, output_tokens=ints(2)), sampling=sampling(3))).wait()
    assert (result.step_id, result.tokens.tolist()) == (7, [OUTPUT_TOKEN] * 3)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (Step(1, embed=EmbedBatch(ints(1), ints(0))), "explicit pages"),
        (Step(1, head=HeadBatch(ints(1))), "explicit pages"),
        (Step(1, token_copies=pairs(1)), "explicit pages"),
        (Step(1, forward=forward(2, hidden_tokens=ints(1), hidden_groups=ints(0))), "hidden states"),
        (Step(1, forward=forward(2), sampling=sampling(1, score_rows=ints(0))), "log-probabilities"),
        (Step(1, forward=forward(2), sampling=sampling(1, dist_rows=ints(0))), "distributions"),
        (Step(1, forward=forward(2), sampling=sampling(1, num_logprobs=ints(0))), "log-probabilities"),
        (Step(1, forward=forward(2), sampling=sampling(1, late_mask=np.ones(1, np.bool_))), "grammars"),
    ],
)
def test_what_has_no_result_is_refused_by_name(step: Step, what: str) -> None:
    with pytest.raises(Unsupported, match=what):
        make()[0].launch(step)


def test_swaps_without_measured_times_are_refused() -> None:
    device = small_device()
    worker, _ = make(costs=CostModel(device.forward, None, None, 64))
    with pytest.raises(ConfigError, match="swaps"):
        worker.launch(Step(1, swap_outs=pairs(1)))


def test_due_actions_run_in_order_of_time_then_of_adding() -> None:
    agenda, seen = Agenda(), list[tuple[str, float]]()
    for name, time_s in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("late", 5.0)):
        agenda.at(time_s, lambda due_s, name=name: seen.append((name, due_s)))  # type: ignore[misc]
    agenda.at(1.5, lambda due_s: agenda.at(1.0, lambda due_s: seen.append(("added", due_s))))
    agenda.run_due(2.0)
    assert seen == [("a", 1.0), ("added", 1.0), ("b", 2.0), ("c", 2.0)]
    assert agenda.next_s == 5.0
    with pytest.raises(ValueError, match="inf"):
        agenda.at(float("inf"), lambda due_s: None)


def test_virtual_time_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.move_to(2.0)
    with pytest.raises(ValueError, match="back"):
        clock.move_to(1.0)
