"""`Simulation`: the loop of one engine on virtual time. Nothing here is random, and no order depends on hashes, so
equal calls give equal steps; `StepDigest` holds the test of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from weft.core.step import Step
from weft.sched.in_flight import InFlight
from weft.sched.scheduler import Scheduler
from weft.sim.clock import Action, Agenda, VirtualClock
from weft.sim.engine import SimulatedEngine, StepObserver
from weft.sim.worker import CostModelWorker, StepTiming


class Simulation:
    """Runs one engine until nothing is left to do."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: CostModelWorker,
        clock: VirtualClock,
        observers: Sequence[StepObserver] = (),
        *,
        overlap: bool = True,
    ):
        """`clock` must be the worker's. Without `overlap` a step is decided when the one before is done."""
        self.engine = SimulatedEngine(scheduler, worker, clock, observers)
        self.scheduler = scheduler
        self.clock = clock
        self._overlap = overlap
        self._agenda = Agenda()

    def at(self, time_s: float, action: Action) -> None:
        """Call `action` at a time; during a step, at its end."""
        self._agenda.at(time_s, action)

    def run(self, until_s: float = float("inf")) -> None:
        """Go on until nothing is left to do, or to the first moment between steps at or after `until_s`.

        Raises `WeftError` when an operation fails, or when sequences wait and nothing can run.
        """
        while self.clock.now() < until_s:
            self._agenda.run_due(self.clock.now())
            if self.engine.num_launched or self.scheduler.has_work:
                self.step()
            elif self._agenda.next_s < float("inf"):
                self.clock.move_to(max(self.clock.now(), min(self._agenda.next_s, until_s)))
            else:
                return

    def step(self) -> None:
        """One turn of the loop: launch the next step, then take in the one before."""
        is_busy = self.engine.num_launched > 0
        is_launched = self.engine.launch()
        if is_busy or (is_launched and not self._overlap):
            self.engine.complete()


class StepDigest:
    """A hash over all steps: their numbers, rows, pages, copies and times. Equal digests mean equal schedules."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def observe(self, step: Step, flight: InFlight, timing: StepTiming) -> None:
        """Add a step to the hash: its sizes, times, pages, copies and sampled rows."""
        self._hash.update(np.array([step.step_id, flight.num_tokens, flight.num_rows], np.int64).tobytes())
        self._hash.update(np.array([timing.begin_s, timing.device_s], np.float64).tobytes())
        parts = [step.swap_outs, step.page_copies, step.swap_ins]
        if step.forward is not None:
            parts += [step.forward.q_indptr, step.forward.kv_lens, step.forward.kv_page_ids, step.forward.token_ids]
        if step.sampling is not None:
            parts += [step.sampling.rows, step.sampling.slots]
        for part in parts:
            self._hash.update(len(part).to_bytes(4, "little"))
            self._hash.update(np.ascontiguousarray(part).tobytes())

    def hexdigest(self) -> str:
        """The hash of the steps so far."""
        return self._hash.hexdigest()
