"""`SimulatedCluster`: several engines on one virtual clock, and the calls of models that they answer.

Each engine runs as in `weft.sim.loop`; their steps end at different times, and what is due happens at its own time,
also in the middle of steps. A call is one sequence: a prompt, and as many tokens as its answer has. As a server does,
the cluster gives the sequence up when the call has ended, and lets its KV be found until the pages are needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from weft.abi.errors import WeftError
from weft.cluster.route_costs import EngineView
from weft.cluster.router import RoutedRequest, Router
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.objectives import Objective
from weft.core.sampling import StopParams
from weft.core.waits import WaitKind
from weft.core.wire import Append, Command, EndRetain, Finished, Generate, Open, OperationUsage, Release
from weft.programs.retains import PrefixRetains
from weft.sched.step_share import held_factor
from weft.sim.clock import Action, Agenda, VirtualClock
from weft.sim.devices import Device
from weft.sim.engine import SimulatedEngine
from weft.sim.run import SimulationSettings


class SimulatedCall(NamedTuple):
    """A request, and the answer that it will have."""

    prompt: bytes
    """Packed token ids, at least one."""
    answer: bytes
    """The same."""
    objective: Objective = "latency"
    deadline_s: float | None = None
    priority: int = 0
    session: str = ""
    """Calls of the same session belong together, as far as the choice of the engine knows."""
    replica: int | None = None
    """The engine that a plan has for it; None: any."""
    wait_kind: str = WaitKind.CHAT
    """What its client does after the answer, as `Release.kind`."""
    expected_in_s: float | None = None
    """As `Release.expected_in_s`."""

    @property
    def num_output(self) -> int:
        """Tokens of the answer."""
        return len(self.answer) // TOKEN_BYTES


class SimulatedTimes(NamedTuple):
    """How a call went; times in virtual seconds."""

    asked_s: float
    first_s: float
    """When its first token came."""
    end_s: float
    engine: int
    usage: OperationUsage


OnStart = Callable[[float], None]
"""Called with the time of a call's first token."""
OnDone = Callable[[SimulatedTimes], None]


class EngineChoice(Protocol):
    """Says which engine serves a call."""

    def choose(self, number: int, call: SimulatedCall) -> int:
        """The index of the engine for a call, whose number is unique."""
        ...

    def started(self, number: int) -> None:
        """The call has its first token."""
        ...

    def ended(self, number: int, call: SimulatedCall) -> None:
        """The call has its answer."""
        ...


class LeastQueue:
    """The engine with the fewest calls that have not ended; of equal ones the first. It knows nothing of KV."""

    def __init__(self, num_engines: int):
        self._open = [0] * num_engines
        self._engines: dict[int, int] = {}

    def choose(self, number: int, call: SimulatedCall) -> int:
        """As `EngineChoice`."""
        engine = min(range(len(self._open)), key=lambda one: (self._open[one], one))
        self._open[engine] += 1
        self._engines[number] = engine
        return engine

    def started(self, number: int) -> None:
        """As `EngineChoice`."""

    def ended(self, number: int, call: SimulatedCall) -> None:
        """As `EngineChoice`."""
        self._open[self._engines.pop(number)] -= 1


class RouterChoice:
    """The router of `weft serve` with several engines of one model."""

    @classmethod
    def of(cls, device: Device, settings: SimulationSettings, num_engines: int) -> RouterChoice:
        """For equal engines."""
        held = held_factor(settings.latency_factor, settings.min_share)
        view = EngineView(
            True, 1, settings.max_running, device.num_pages, device.page_size, device.forward, held_factor=held
        )
        return cls([view] * num_engines)

    def __init__(self, views: Sequence[EngineView]):
        self._views = tuple(views)
        self._router = Router(len(self._views))
        self._routed: dict[int, RoutedRequest] = {}

    def choose(self, number: int, call: SimulatedCall) -> int:
        """As `EngineChoice`."""
        most = call.num_output
        routed = self._router.route(
            self._views,
            call.prompt,
            "",
            session=call.session,
            max_output=most,
            preferred=call.replica,
            objective=call.objective,
        )
        self._routed[number] = routed
        return routed.engine

    def started(self, number: int) -> None:
        """As `EngineChoice`."""
        self._router.answered(self._routed[number])

    def ended(self, number: int, call: SimulatedCall) -> None:
        """As `EngineChoice`."""
        routed = self._routed.pop(number)
        self._router.ended(routed, self._views[routed.engine], call.answer)


class SimulatedCluster:
    """Engines that share a clock."""

    def __init__(self, engines: Sequence[SimulatedEngine], clock: VirtualClock, choice: EngineChoice | None = None):
        """`clock` must be that of all engines. Without a `choice` calls go to the engine with the fewest of them."""
        self.engines = tuple(engines)
        self.clock = clock
        self._choice = choice or LeastQueue(len(self.engines))
        self._agenda = Agenda()
        self._numbers = itertools.count(1)
        self.retains = tuple(PrefixRetains(_Link(self, engine, self._numbers)) for engine in self.engines)
        """Prefixes that each engine keeps on request."""
        self._has_looked_ahead = [False] * len(self.engines)
        """Whether the step behind the one that runs was decided, though it may be none."""

    def at(self, time_s: float, action: Action) -> None:
        """Call `action` at a time."""
        self._agenda.at(time_s, action)

    def call(self, call: SimulatedCall, on_done: OnDone, on_start: OnStart = lambda now: None) -> int:
        """Send a call now, and tell when it starts and ends. Returns the index of its engine."""
        number, handle, append, op = (next(self._numbers) for _ in range(4))
        index = self._choice.choose(number, call)
        engine = self.engines[index]
        asked_s = self.clock.now()

        def started(now: float) -> None:
            self._choice.started(number)
            on_start(now)

        def ended(event: Finished, now: float) -> None:
            self._choice.ended(number, call)
            engine.forget(handle)
            engine.submit([Release(seq=handle, kind=call.wait_kind, expected_in_s=call.expected_in_s)])
            usage = event.usage
            on_done(SimulatedTimes(asked_s, asked_s + usage.first_token_s, now, index, usage))

        engine.on_first(op, started)
        engine.on_end(op, ended)
        engine.answer(handle, unpack_tokens(call.answer).tolist())
        stop = StopParams(max_tokens=call.num_output, ignore_eos=True)
        engine.submit(
            [
                Open(seq=handle, objective=call.objective, deadline_s=call.deadline_s, priority=call.priority),
                Append(seq=handle, op=append, tokens=call.prompt),
                Generate(seq=handle, op=op, stop=stop),
            ]
        )
        return index

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing is left to do, or what is next lies after `until_s`. Raises `WeftError` when an operation
        fails, or when sequences wait and nothing can run."""
        while True:
            self._agenda.run_due(self.clock.now())
            for index, engine in enumerate(self.engines):
                if not engine.num_launched:
                    self._has_looked_ahead[index] = not engine.scheduler.has_work or not engine.launch()
                if not self._has_looked_ahead[index]:
                    self._has_looked_ahead[index] = True
                    engine.launch()
            next_s = min(self._agenda.next_s, *(engine.end_s for engine in self.engines))
            if next_s > until_s or math.isinf(next_s):
                return
            self.clock.move_to(max(next_s, self.clock.now()))
            for index, engine in enumerate(self.engines):
                while engine.end_s <= next_s:
                    engine.complete()
                    self._has_looked_ahead[index] = False


class _Link:
    """`RetainLink` of one engine. Commands reach it at the time at which they are posted, behind what is due then."""

    def __init__(self, cluster: SimulatedCluster, engine: SimulatedEngine, numbers: Iterator[int]):
        self.pool = engine.pool
        self._cluster, self._engine, self._numbers = cluster, engine, numbers

    def number(self) -> int:
        """As `RetainLink`."""
        return next(self._numbers)

    def post(self, command: Command) -> None:
        """As `RetainLink`."""
        if isinstance(command, EndRetain):  # which fails where the retain was refused, and nobody waits for it
            self._engine.on_end(command.op, lambda event, now: None, lambda error: None)
        self._cluster.at(self._cluster.clock.now(), lambda now: self._engine.submit([command]))

    def tell(self, op: int, told: Callable[[Finished | WeftError], None]) -> None:
        """As `RetainLink`."""
        self._engine.on_end(op, lambda event, now: told(event), told)
