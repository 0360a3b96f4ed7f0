"""`Simulation`: the engine's loop on virtual time. The scheduler and its cache are those of an engine.

As in `weft.engine.engine`, the next step is decided while one is on the device, results are taken in one step behind,
and commands that come during a step are taken in at its end. The host takes no time. Nothing here is random, and no
order depends on hashes, so equal calls give equal steps; `StepDigest` holds the test of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weft.abi.errors import WeftError
from weft.core.step import Step
from weft.core.wire import Cancelled, Command, Event, Failed, Finished, Token
from weft.sched.in_flight import InFlight
from weft.sched.scheduler import Scheduler
from weft.sim.clock import Action, Agenda, VirtualClock
from weft.sim.worker import CostModelWorker, SimulatedStep, StepTiming

CLIENT = 1
"""The one client of a simulated engine."""

OnEnd = Callable[[Finished, float], None]
"""Called with the event that ended an operation and the time."""


class StepObserver(Protocol):
    """Looks at every step when it has been launched. Must change nothing."""

    def observe(self, step: Step, flight: InFlight, timing: StepTiming) -> None:
        """Called in order of launch."""
        ...


class _OnDevice(NamedTuple):
    handle: SimulatedStep
    flight: InFlight


class Simulation:
    """Runs one scheduler over one worker until nothing is left to do."""

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
        self.scheduler = scheduler
        self.clock = clock
        self.num_steps = 0
        self._worker = worker
        self._observers = list(observers)
        self._overlap = overlap
        self._agenda = Agenda()
        self._on_end: dict[int, OnEnd] = {}
        """By operation."""
        self._previous: _OnDevice | None = None

    def at(self, time_s: float, action: Action) -> None:
        """Call `action` at a time; during a step, at its end."""
        self._agenda.at(time_s, action)

    def submit(self, commands: Sequence[Command]) -> None:
        """Give commands to the scheduler. Call `on_end` for operations first."""
        self._take_in(self.scheduler.handle(CLIENT, commands, self.clock.now()).messages)

    def on_end(self, op: int, call: OnEnd) -> None:
        """Call back when the operation has finished."""
        self._on_end[op] = call

    def run(self, until_s: float = float("inf")) -> None:
        """Go on until nothing is left to do, or to the first moment between steps at or after `until_s`.

        Raises `WeftError` when an operation fails, or when sequences wait and nothing can run.
        """
        while self.clock.now() < until_s:
            self._agenda.run_due(self.clock.now())
            if self._previous is not None or self.scheduler.has_work:
                self.step()
            elif self._agenda.next_s < float("inf"):
                self.clock.move_to(max(self.clock.now(), min(self._agenda.next_s, until_s)))
            else:
                return

    def step(self) -> None:
        """One turn of the loop: launch the next step, then take in the one before."""
        scheduler, previous = self.scheduler, self._previous
        step, flight, events = scheduler.schedule(self.clock.now())
        self._take_in(events.messages)
        launched = None
        if not step.is_empty:
            launched = _OnDevice(self._worker.launch(step), flight)
            scheduler.launched(step.step_id)
            self.num_steps += 1
            for observer in self._observers:
                observer.observe(step, flight, launched.handle.timing)
        elif previous is None:
            raise WeftError("the scheduler has work and no way to do it: a bug in Weft")
        self._previous = None
        if previous is not None:
            self._complete(previous)
        if self._overlap:
            self._previous = launched
        elif launched is not None:
            self._complete(launched)

    def _complete(self, on_device: _OnDevice) -> None:
        self.clock.move_to(max(self.clock.now(), on_device.handle.timing.end_s))
        events = self.scheduler.update(on_device.flight, on_device.handle.wait(), self.clock.now())
        self._take_in(events.messages)

    def _take_in(self, messages: list[tuple[int, Event]]) -> None:
        for _, event in messages:
            if isinstance(event, Token):
                continue  # of each decoding sequence in each step, and known beforehand
            if isinstance(event, Finished):
                call = self._on_end.pop(event.op, None)
                if call is not None:
                    call(event, self.clock.now())
            elif isinstance(event, Failed):
                raise WeftError(f"an operation failed: {event.error.message}")
            elif isinstance(event, Cancelled):
                self._on_end.pop(event.op, None)


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
