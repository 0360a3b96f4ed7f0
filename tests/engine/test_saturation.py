"""The saturation point of a cost profile bounds what a step takes of prompts, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.engine.driver import Driver
from tests.engine.test_costs import TRUE, profile
from weft.config import EngineConfig
from weft.core import wire
from weft.core.cost.model import CostModel, StepShape
from weft.core.ids import pack_tokens
from weft.core.step import Step
from weft.engine.costs import StepCosts
from weft.engine.profiles import saturation_tokens
from weft.sched.config import SchedulerConfig, prompt_budget


def launched(driver: Driver) -> list[Step]:
    """The steps that a driver's worker gets from now on."""
    steps: list[Step] = []
    launch = driver.worker.launch

    def record(step: Step) -> object:
        steps.append(step)
        return launch(step)

    driver.worker.launch = record  # type: ignore[method-assign, assignment]
    return steps


def test_only_the_profile_of_an_interactive_server_bounds_prompts() -> None:
    one = profile()
    assert saturation_tokens(EngineConfig(), one) == one.saturation_tokens
    assert saturation_tokens(EngineConfig(), None) is None
    assert saturation_tokens(EngineConfig(max_step_tokens=100), one) is None
    assert saturation_tokens(EngineConfig(performance_mode="throughput"), one) is None


@pytest.mark.parametrize(
    ("saturation", "others", "expected"),
    [(None, 64, 512), (100, 0, 100), (100, 64, 100), (100, 90, 106), (10, 64, 80), (4000, 64, 512), (10, 505, 512)],
)
def test_prompts_get_what_others_leave_of_the_saturation_point(
    saturation: int | None, others: int, expected: int
) -> None:
    """A page at least, and never more than the device has room for."""
    config = SchedulerConfig(max_context=100, max_running=64, max_step_tokens=512, saturation_tokens=saturation)
    assert prompt_budget(config, others, 16) == expected


def test_prompts_are_cut_at_the_saturation_point() -> None:
    """And everything comes out as it would without."""
    driver = Driver(max_step_tokens=128, saturation_tokens=48, num_slots=32, max_running=32)
    steps = launched(driver)
    for _ in range(4):
        driver.generate(driver.open([driver.random.randrange(900) for _ in range(150)]), 20, eos=False)
    driver.run()
    sizes = [step.forward.num_tokens for step in steps if step.forward is not None]
    assert max(sizes) == 48
    assert sizes[0] == 48
    driver.finish()


def test_forwards_of_programs_may_have_more() -> None:
    """What cannot be split is not refused, nor left to wait, for the sake of others' time: not even where those who
    decode fill what prompts may have."""
    sizes: dict[str, Any] = {
        "num_slots": 8,
        "max_running": 4,
        "max_step_tokens": 128,
        "saturation_tokens": 4,
        "num_embed_slots": 8,
    }
    driver = Driver(lenient=True, **sizes)
    for _ in range(4):
        driver.generate(driver.open([5, 6]), 60, eos=False)
    while len(driver.engine.scheduler.sequences.decoding().sequences) < 4:
        driver.step()
    steps = launched(driver)
    op, packed = next(driver.numbers), pack_tokens(list(range(96)))
    driver.send(
        wire.OpenSpace(space=1, op=next(driver.numbers)),
        wire.OpenQueue(space=1, queue=1, op=next(driver.numbers)),
        wire.ForwardSample(space=1, queue=1, op=op, read=b"", tokens=packed, positions=packed),
    )
    driver.run()
    [answer] = [event for event in driver.others if getattr(event, "op", None) == op]
    assert isinstance(answer, wire.Finished), answer
    assert steps[0].forward is not None
    assert steps[0].forward.num_tokens == 4 + 96


def test_the_next_turn_is_predicted() -> None:
    costs = StepCosts(CostModel(TRUE, None, None, 1))
    assert costs.turn_s(3) is None
    driver = Driver(max_running=8)
    for _ in range(2):
        driver.generate(driver.open([5] * 40), 10, eos=False)
    steps = launched(driver)
    for _ in range(4):
        driver.step()
    prompt, turn = steps[0], steps[-1]
    assert prompt.forward is not None
    assert turn.forward is not None
    costs.launched(prompt)
    assert costs.turn_s(3) is None
    costs.launched(turn)
    kv = int(turn.forward.kv_lens.sum())
    assert costs.turn_s(4) == pytest.approx(TRUE.predict_s(StepShape.decodes(4, 2 * kv)))
    costs.launched(prompt)
    assert costs.turn_s(2) == pytest.approx(TRUE.predict_s(StepShape.decodes(2, kv)))
    costs.launched(msgspec.structs.replace(prompt, forward=None))
    assert StepCosts(None).turn_s(1) is None


def test_programs_are_waited_for_as_long_as_the_predicted_step_allows() -> None:
    """Steps have been slow; the profile knows that the next one, of single tokens, is not."""
    driver = Driver(cost_model=CostModel(TRUE, None, None, 1), device_s=lambda step: 0.0)
    engine = driver.engine
    for number in (1, 2):
        driver.send(wire.Open(seq=number))

    def ask(number: int) -> None:
        outputs = wire.PromptOutputs(dist=1)
        driver.send(wire.Append(seq=number, op=next(driver.numbers), tokens=pack_tokens([5]), outputs=outputs))

    for number in (1, 2):
        ask(number)
    driver.run()
    engine._gather.stepped(5.0)
    engine._gather._return_s = 0.02
    ask(1)
    predicted_s = engine.costs.turn_s(1)
    assert predicted_s is not None
    assert predicted_s < 0.02
    assert engine.gather_s() == 0
    engine.costs.model = None
    assert engine.gather_s() > 0
