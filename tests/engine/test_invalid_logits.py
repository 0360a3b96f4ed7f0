"""Requests whose numbers are not finite fail by name; the others of their steps are untouched."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from weft.abi.errors import InvalidLogits, from_kind
from weft.core import wire
from weft.core.ids import pack_tokens


def test_a_sampler_without_numbers_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    ops = [driver.generate(driver.open([5 + i] * 20), 30, eos=False) for i in range(4)]
    for _ in range(6):
        driver.step()
    number = driver.operations[ops[1]].seq
    broken = driver.operations.pop(ops[1])
    [slot] = [s.slot for s in driver.engine.scheduler.sequences if s.handle == number]
    driver.worker.invalid_slots = {slot}
    driver.run()
    [failed] = [event for event in driver.others if isinstance(event, wire.Failed)]
    assert (failed.op, failed.error.kind) == (ops[1], "invalid_logits")
    assert isinstance(from_kind(failed.error.kind, failed.error.message), InvalidLogits)
    assert "NaN" in failed.error.message
    assert failed.usage.num_output_tokens >= len(broken.tokens) > 0
    assert all(isinstance(operation.ending, wire.Finished) for operation in driver.operations.values())
    assert "NaN or infinite" in caplog.text
    driver.finish()


@pytest.mark.parametrize(
    "outputs",
    [
        wire.PromptOutputs(logprobs=0),
        wire.PromptOutputs(hidden="mean"),
        wire.PromptOutputs(hidden="last"),
        wire.PromptOutputs(dist=4),
    ],
    ids=["logprobs", "mean", "last", "dist"],
)
def test_a_report_without_numbers_fails(outputs: wire.PromptOutputs) -> None:
    driver = Driver(max_step_tokens=32)
    driver.worker.invalid_scores = True
    driver.send(wire.Open(seq=500), wire.Append(seq=500, op=501, tokens=pack_tokens([3] * 70), outputs=outputs))
    other = driver.generate(driver.open([9] * 30), 5)
    driver.run()
    ends = [event for event in driver.others if isinstance(event, wire.Finished | wire.Failed)]
    assert [(type(end), end.op) for end in ends] == [(wire.Failed, 501)]
    assert ends[0].error.kind == "invalid_logits"
    assert isinstance(driver.operations[other].ending, wire.Finished)
    driver.send(wire.Release(seq=500))
    driver.finish()
