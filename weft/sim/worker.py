"""`CostModelWorker`: a worker that computes nothing and takes as long as the cost model says.

A step begins when it is launched and the step before it is done. Its forward takes T_fwd of its shape, and the pages it
moves take T_swap. With *asynchronous* transfers both go on at the same time and the step takes what
`CostModel.predict_step_s` says: the longer of both, the forward lengthened by what moving takes of the same cores. With
synchronous ones it takes the sum, and so it does where the forward needs a page that the step brings in. Copies within
the device take no time.

Every sampler gets `OUTPUT_TOKEN`. What reports about logits (log-probabilities, distributions, hidden states), explicit
pages and grammars are refused by name: there are no logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.abi.errors import ConfigError, Unsupported
from weft.core.clock import Clock
from weft.core.cost.model import CostModel, StepShape
from weft.core.protocols import WorkerSpec
from weft.core.step import I32, LateInputs, Step, StepHandle, StepResult

OUTPUT_TOKEN = 1
"""What every sampler draws."""
NO_SHAPE = StepShape(0, 0, 0, 0, 0, 0)


class StepTiming(NamedTuple):
    """When a step holds the device, in virtual seconds."""

    begin_s: float
    forward_s: float
    """T_fwd of its shape; 0 without a forward."""
    swap_s: float
    """T_swap of the pages it moves."""
    device_s: float
    """What it takes in all."""
    shape: StepShape

    @property
    def end_s(self) -> float:
        """Virtual time in seconds at which the device is free again."""
        return self.begin_s + self.device_s


class SimulatedStep:
    """A launched step; its result is there at `timing.end_s`, and `wait` does not wait for that."""

    def __init__(self, step_id: int, timing: StepTiming, tokens: I32, clock: Clock):
        self.step_id = step_id
        self.timing = timing
        self._tokens = tokens
        self._clock = clock

    def done(self) -> bool:
        """Whether the clock has reached its end."""
        return self._clock.now() >= self.timing.end_s

    def wait(self) -> StepResult:
        """The result. Who owns the clock moves it to `timing.end_s` first."""
        return StepResult(self.step_id, tokens=self._tokens, device_s=self.timing.device_s)


class CostModelWorker:
    """A `weft.core.protocols.Worker` that computes nothing: steps take the time that the cost model predicts, on
    virtual time, and every sampler draws the same token."""

    def __init__(self, spec: WorkerSpec, costs: CostModel, clock: Clock, *, synchronous_swaps: bool = False):
        self._spec = spec
        self._costs = costs
        self._clock = clock
        self._synchronous_swaps = synchronous_swaps
        self._free_at_s = 0.0
        self._tokens: dict[int, I32] = {}
        """Results by the number of samplers."""

    @property
    def spec(self) -> WorkerSpec:
        """The sizes it was given."""
        return self._spec

    def launch(self, step: Step) -> SimulatedStep:
        """Set when the step begins and ends. Raises `Unsupported` for what has no result here."""
        _refuse(step)
        shape = NO_SHAPE if step.forward is None else StepShape.of(step.forward)
        forward_s = self._costs.predict_forward_s(shape) if shape.num_tokens else 0.0
        num_out, num_in = len(step.swap_outs), len(step.swap_ins)
        swap_s: float | None = 0.0
        device_s: float | None = forward_s
        if num_out or num_in:
            swap_s = device_s = self._costs.predict_swap_s(num_out, num_in)
            if shape.num_tokens and (self._synchronous_swaps or self._waits(step)):
                device_s = None if swap_s is None else forward_s + swap_s
            elif shape.num_tokens:
                device_s = self._costs.predict_step_s(shape, num_out, num_in)
        if swap_s is None or device_s is None:
            raise ConfigError(
                "the device's profile has no times of swaps: measure it with a host tier, or simulate none"
            )
        timing = StepTiming(max(self._clock.now(), self._free_at_s), forward_s, swap_s, device_s, shape)
        self._free_at_s = timing.end_s
        count = 0 if step.sampling is None else len(step.sampling.rows)
        tokens = self._tokens.get(count)
        if tokens is None:
            tokens = self._tokens[count] = np.full(count, OUTPUT_TOKEN, np.int32)
        return SimulatedStep(step.step_id, timing, tokens, self._clock)

    def _waits(self, step: Step) -> bool:
        """Whether the forward needs a page that the same step brings in."""
        sizes = self._spec.page_size, self._spec.num_device_pages
        return (
            bool(len(step.swap_ins)) and step.forward is not None and step.forward.touches(step.swap_ins[:, 1], *sizes)
        )

    def bind(self, handle: StepHandle, late: LateInputs) -> None:
        """Do nothing: no step here waits for masks."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def _refuse(step: Step) -> None:
    if step.embed is not None or step.head is not None or len(step.token_copies):
        raise Unsupported("the simulator has no explicit pages")
    if step.forward is not None and len(step.forward.hidden_tokens):
        raise Unsupported("the simulator has no hidden states")
    sampling = step.sampling
    if sampling is None:
        return
    if len(sampling.score_rows) or len(sampling.dist_rows) or np.maximum.reduce(sampling.num_logprobs, initial=-1) >= 0:
        raise Unsupported("the simulator has no logits, so no log-probabilities and distributions")
    if np.logical_or.reduce(sampling.late_mask):
        raise Unsupported("the simulator has no grammars")
