"""What an engine makes of its cost model: compares every step with its prediction, counts how far that was off, and
tells what the next step of single tokens would take.

Owns the shapes of steps in flight. Without a profile there is no model, and nothing is predicted or counted.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.core.cost.model import CostModel, StepShape
from weft.core.step import Step, StepResult
from weft.metrics import RATIO_BUCKETS, Histogram


class _Work(NamedTuple):
    """What the time of a step in flight is compared with."""

    shape: StepShape
    num_out: int
    num_in: int


class StepCosts:
    """Follows steps from launch to result. A few microseconds per step."""

    def __init__(self, model: CostModel | None):
        self.model = model
        self.ratios = Histogram(RATIO_BUCKETS)
        """Measured to predicted time of every step that was compared."""
        self._in_flight: dict[int, _Work] = {}
        self._kv_per_row: float | None = None
        """Of the last step that had nothing but rows of one token."""

    def launched(self, step: Step) -> None:
        """Remember the shape of a step and the pages that it moves to and from the host. One that copies pages or
        tokens on the device, or hidden vectors, is not compared: its time is not that of its forward alone."""
        if self.model is None or step.forward is None:
            return
        shape = StepShape.of(step.forward)
        if shape.num_tokens == shape.num_rows:
            self._kv_per_row = shape.decode_kv / shape.num_rows
        if step.head is not None or step.embed is not None:
            return
        if len(step.page_copies) or len(step.token_copies):
            return
        self._in_flight[step.step_id] = _Work(shape, len(step.swap_outs), len(step.swap_ins))

    def turn_s(self, num_rows: int) -> float | None:
        """Predicted seconds of a step with one token for each of `num_rows`, their contexts as long as lately. None
        without a profile, and before there was such a step."""
        if self.model is None or self._kv_per_row is None:
            return None
        return self.model.predict_forward_s(StepShape.decodes(num_rows, round(num_rows * self._kv_per_row)))

    def finished(self, result: StepResult) -> None:
        """Correct the model by what a step took."""
        work = self._in_flight.pop(result.step_id, None)
        if work is None or self.model is None:
            return
        ratio = self.model.observe(work.shape, result.device_s, work.num_out, work.num_in)
        if ratio is not None:
            self.ratios.observe(ratio)
