"""`SimulatedEngine`: a scheduler and its cache over a worker that only takes time, as one engine of a simulation.

As in `weft.engine.engine`, the next step is decided while one is on the device, results are taken in one step behind,
and what comes during a step is served from the next decision on. The host takes no time. Knows no other engine; who
owns the clock says when a step is decided (`launch`) and when it has ended (`complete`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from weft.abi.errors import WeftError
from weft.core.step import Step, StepResult
from weft.core.wire import Cancelled, Command, Event, Failed, Finished, Token
from weft.programs.retains import DevicePages
from weft.sched.in_flight import InFlight
from weft.sched.scheduler import Scheduler
from weft.sim.clock import VirtualClock
from weft.sim.worker import CostModelWorker, SimulatedStep, StepTiming

CLIENT = 1
"""The one client of a simulated engine."""

OnEnd = Callable[[Finished, float], None]
"""Called with the event that ended an operation and the time."""
OnFailure = Callable[[WeftError], None]
"""Called with the error of an operation."""
OnFirst = Callable[[float], None]
"""Called with the time of an operation's first token."""


class StepObserver(Protocol):
    """Looks at every step when it has been launched. Must change nothing."""

    def observe(self, step: Step, flight: InFlight, timing: StepTiming) -> None:
        """Called in order of launch."""
        ...


class _OnDevice(NamedTuple):
    handle: SimulatedStep
    flight: InFlight


class SimulatedEngine:
    """One engine. Its clock is that of its worker, and may be shared with other engines."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: CostModelWorker,
        clock: VirtualClock,
        observers: Sequence[StepObserver] = (),
    ):
        self.scheduler = scheduler
        self.clock = clock
        self.num_steps = 0
        self.busy_s = 0.0
        """For which steps held the device."""
        self._worker = worker
        self._observers = list(observers)
        self._on_device: deque[_OnDevice] = deque()
        """Launched steps, in order: the first one runs."""
        self._on_end: dict[int, OnEnd] = {}
        """By operation."""
        self._on_failure: dict[int, OnFailure] = {}
        self._on_first: dict[int, OnFirst] = {}
        self._answers: dict[int, Sequence[int]] = {}
        """By handle of a sequence."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Give commands to the scheduler. Call `on_end` and `on_first` for operations first."""
        self._take_in(self.scheduler.handle(CLIENT, commands, self.clock.now()).messages)

    def on_end(self, op: int, call: OnEnd, on_failure: OnFailure | None = None) -> None:
        """Call back when the operation has finished. Without `on_failure` its failure ends the simulation."""
        self._on_end[op] = call
        if on_failure is not None:
            self._on_failure[op] = on_failure

    def on_first(self, op: int, call: OnFirst) -> None:
        """Call back when the operation has its first token."""
        self._on_first[op] = call

    def answer(self, handle: int, tokens: Sequence[int]) -> None:
        """Have a sequence generate these tokens, instead of the same one each time. Until `forget`."""
        self._answers[handle] = tokens

    def forget(self, handle: int) -> None:
        """The sequence generates nothing more."""
        self._answers.pop(handle, None)

    @property
    def pool(self) -> DevicePages:
        """Its device pages."""
        return DevicePages(self._worker.spec.num_device_pages, self._worker.spec.page_size)

    @property
    def num_launched(self) -> int:
        """Steps whose results have not been taken in."""
        return len(self._on_device)

    @property
    def end_s(self) -> float:
        """When the step that runs ends; infinity: none runs."""
        return self._on_device[0].handle.timing.end_s if self._on_device else math.inf

    def launch(self) -> bool:
        """Decide the next step and launch it; it runs behind those that were launched before. Returns whether there is
        one. Raises `WeftError` when sequences wait, no step is on its way and none can be made."""
        step, flight, events = self.scheduler.schedule(self.clock.now())
        self._take_in(events.messages)
        if step.is_empty:
            if not self._on_device:
                raise WeftError("the scheduler has work and no way to do it: a bug in Weft")
            return False
        handle = self._worker.launch(step)
        self.scheduler.launched(step.step_id)
        self.num_steps += 1
        self.busy_s += handle.timing.device_s
        for observer in self._observers:
            observer.observe(step, flight, handle.timing)
        self._on_device.append(_OnDevice(handle, flight))
        return True

    def complete(self) -> None:
        """Move the clock to the end of the step that runs, if it is not there yet, and take its result in."""
        handle, flight = self._on_device.popleft()
        self.clock.move_to(max(self.clock.now(), handle.timing.end_s))
        result = handle.wait()
        if self._answers:
            result = self._answered(flight, result)
        self._take_in(self.scheduler.update(flight, result, self.clock.now()).messages)

    def _answered(self, flight: InFlight, result: StepResult) -> StepResult:
        """The result with the tokens that its sequences are to generate."""
        tokens = result.tokens.copy()
        for index, (sequence, epoch) in enumerate(flight.sampled):
            answer = self._answers.get(sequence.handle)
            if answer is not None and sequence.epoch == epoch:
                tokens[index] = answer[sequence.ops[0].num_output]  # type: ignore[union-attr]
        return StepResult(result.step_id, tokens=tokens, device_s=result.device_s)

    def _take_in(self, messages: list[tuple[int, Event]]) -> None:
        for _, event in messages:
            if isinstance(event, Token):  # of each decoding sequence in each step, and known beforehand
                if self._on_first and event.op in self._on_first:
                    self._on_first.pop(event.op)(self.clock.now())
            elif isinstance(event, Finished):
                call = self._on_end.pop(event.op, None)
                self._on_failure.pop(event.op, None)
                if call is not None:
                    call(event, self.clock.now())
            elif isinstance(event, Failed):
                if event.op not in self._on_failure:
                    raise WeftError(f"an operation failed: {event.error.message}")
                self._on_end.pop(event.op, None)
                self._on_failure.pop(event.op)(event.error.error())
            elif isinstance(event, Cancelled):
                self._on_end.pop(event.op, None)
                self._on_first.pop(event.op, None)
