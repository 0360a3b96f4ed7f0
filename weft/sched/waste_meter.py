"""What steps waste of KV memory, by cause: the definitions for engine and simulator, and the engine's count.

Waste is in token-seconds, the KV of one token held for one second, after the equations of APIServe (section 3),
measured step by step:

    preserve    KV on the device of sequences that wait for something other than the device; pages that several of them
                share count once, pages that a running or queued sequence uses too do not count
    recompute   KV of the sequences of a step of which it computes tokens again
    swap        device pages that a step moves to or from the host
    stalled     KV of the other sequences of a step, for the time by which recomputation and swaps lengthen it

A page that several sequences of a step share counts once.

`weft.sched.policies.waste` has the equations by which policies estimate it.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.core.cost.model import CostModel, StepShape
from weft.core.step import Step
from weft.sched.in_flight import InFlight


class Waste(NamedTuple):
    """KV memory x time that did no work, in token-seconds by cause."""

    preserve: float = 0.0
    recompute: float = 0.0
    swap: float = 0.0
    stalled: float = 0.0

    def plus(self, other: Waste) -> Waste:
        """The sum, cause by cause."""
        return Waste(
            self.preserve + other.preserve,
            self.recompute + other.recompute,
            self.swap + other.swap,
            self.stalled + other.stalled,
        )


class StepKV(NamedTuple):
    """KV tokens on the device while a step runs."""

    intercepted: int = 0
    """Of sequences that wait for something other than the device."""
    computing: int = 0
    """Of the sequences that the step computes something for."""
    recomputing: int = 0
    """Of those, KV of the sequences of which it computes tokens again."""
    moved: int = 0
    """Of pages that the step moves between the tiers."""

    def waste(self, device_s: float, recompute_s: float, swap_s: float) -> Waste:
        """What a step of `device_s` seconds wastes, which recomputation lengthened by `recompute_s` of them and swaps
        by `swap_s`."""
        return Waste(
            self.intercepted * device_s,
            self.recomputing * device_s,
            self.moved * device_s,
            recompute_s * (self.computing - self.recomputing) + swap_s * self.computing,
        )


class _Noted(NamedTuple):
    kv: StepKV
    recompute_part: float
    """Of the step's time, that by which recomputation lengthens it."""
    swap_part: float


class WasteMeter:
    """Adds up the waste of an engine's steps, from launch to result. One call per step that wastes nothing.

    What is preserved counts while some sequence waits for pages: nothing else needs the memory at other times. By how
    much a step was lengthened is predicted, so without `costs` nothing counts as stalled.
    """

    def __init__(self, costs: CostModel | None, page_size: int):
        self.total = Waste()
        self._costs = costs
        self._page_size = page_size
        self._in_flight: dict[int, _Noted] = {}

    def launched(self, step: Step, flight: InFlight) -> None:
        """Note what a step holds and moves."""
        num_out, num_in = len(step.swap_outs), len(step.swap_ins)
        if not (num_out or num_in or flight.recomputed_tokens or flight.waits_for_pages):
            return
        recompute_part = swap_part = 0.0
        computing = recomputing = 0
        if step.forward is not None and (num_out or num_in or flight.recomputed_tokens):
            computing = step.forward.kv_tokens(self._page_size)
            recomputing = step.forward.kv_tokens(self._page_size, flight.recomputing_rows)
            if self._costs is not None:
                shape = StepShape.of(step.forward)
                recompute_part, swap_part = _parts(self._costs, shape, flight.recomputed_tokens, num_out, num_in)
        kv = StepKV(
            flight.intercepted_tokens if flight.waits_for_pages else 0,
            computing,
            recomputing,
            (num_out + num_in) * self._page_size,
        )
        self._in_flight[step.step_id] = _Noted(kv, recompute_part, swap_part)

    def finished(self, step_id: int, device_s: float) -> None:
        """A step held the device for so long."""
        noted = self._in_flight.pop(step_id, None)
        if noted is not None:
            waste = noted.kv.waste(device_s, noted.recompute_part * device_s, noted.swap_part * device_s)
            self.total = self.total.plus(waste)


def _parts(costs: CostModel, shape: StepShape, again: int, num_out: int, num_in: int) -> tuple[float, float]:
    """Parts of the predicted time of a step by which recomputing `again` tokens and moving pages lengthen it."""
    forward_s = costs.predict_forward_s(shape)
    whole_s = costs.predict_step_s(shape, num_out, num_in) if num_out or num_in else forward_s
    if whole_s is None:  # how pages move beside a forward was not measured
        whole_s = max(forward_s, costs.predict_swap_s(num_out, num_in) or 0.0)
    without = shape._replace(num_tokens=shape.num_tokens - again)
    without_s = costs.predict_forward_s(without) if without.num_tokens else 0.0
    return ((forward_s - without_s) / whole_s, (whole_s - forward_s) / whole_s) if whole_s else (0.0, 0.0)
