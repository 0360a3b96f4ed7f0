"""Workflows on simulated engines: who runs them, and the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from bench.workflows.floor import Floor, FloorEngines, floor_of
from bench.workflows.shapes import Workload
from weft.core.ids import unpack_tokens
from weft.core.wire import EngineStats
from weft.sim.clock import VirtualClock
from weft.sim.cluster import EngineChoice, LeastQueue, RouterChoice, SimulatedCluster
from weft.sim.devices import Device
from weft.sim.loop import StepDigest
from weft.sim.run import SimulationSettings, simulated_engine
from weft.sim.workflow_run import UNBOUNDED, PlayedCall, PlayerLimits, SpelledPrompts, WorkflowPlayer
from weft.workflow.graph import WorkflowGraph, canonical, graph_from_dict, graph_to_dict
from weft.workflow.passes import optimise
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.order import row_by_row
from weft.workflow.run.plan_rounds import PlanRounds, PlanSources
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.state import RunState

MODEL = "simulated"
_WAITING = Concurrency().waiting_calls
ROOMY_TOKENS = 20_000_000
_PROMPTS = SpelledPrompts()


class Contender(NamedTuple):
    """Who runs a workflow."""

    merges: bool = False
    """Whether equal calls are made once."""
    plans: bool = False
    """Whether calls leave in the order of a plan, else row by row."""
    limits: PlayerLimits = PlayerLimits()
    """Of one engine."""
    routes: bool = False
    """Whether calls go where the router of `weft serve` sends them, else to the engine with the fewest."""
    by_operator: bool = False
    is_profiled: bool = False
    """Whether the lengths of answers are known, else a sample of the rows shows them."""


CONTENDERS: Mapping[str, Contender] = {
    "weft": Contender(True, True, PlayerLimits(1000, _WAITING), True),
    "clients": Contender(),
    "query-wise": Contender(limits=PlayerLimits(rows=1)),
    "operator-wise": Contender(by_operator=True),
    "clients-merged": Contender(True),
    "clients-routed": Contender(routes=True),
    "weft-profiled": Contender(True, True, PlayerLimits(1000, _WAITING), True, is_profiled=True),
    "weft-unplanned": Contender(True, False, PlayerLimits(1000, _WAITING), True),
    "weft-all-at-once": Contender(True, True, PlayerLimits(1000), True),
    "weft-unmerged": Contender(False, True, PlayerLimits(1000, _WAITING), True),
    "weft-least-queue": Contender(True, True, PlayerLimits(1000, _WAITING)),
}
"""By name. The first is what is shipped; those behind `operator-wise` tell what its parts are worth."""


class PlayedRun(NamedTuple):
    """Figures of a run. Times are virtual seconds."""

    seconds: float
    calls: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompts, those that had KV when their call began."""
    prefill_tokens: int
    """Tokens that were computed from prompts, those computed again after a preemption too."""
    output_tokens: int
    evictions: int
    preemptions: int
    rows_per_step: float
    """Sequences of a step on average."""
    busy_share: float
    """Of all engines' time, that in which they computed."""
    digest: str
    """Of all steps of all engines."""

    @property
    def hit_rate(self) -> float:
        """Cached tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens


def shrunk(device: Device, scale: int) -> Device:
    """The device for workloads whose lengths are divided by `scale`: pool and pages are divided likewise, and reading a
    KV entry takes so many times as long. Then every term of a run's time is divided by the scale, the tokens of a step
    are as many, and a simulation takes that many steps less."""
    forward = msgspec.structs.replace(
        device.forward,
        per_decode_kv_s=device.forward.per_decode_kv_s * scale,
        per_chunk_kv_s=device.forward.per_chunk_kv_s * scale,
    )
    size = device.page_size // scale
    return msgspec.structs.replace(device, kv_tokens=device.kv_tokens // scale, page_size=size, forward=forward)


def engine_settings(**changes: Any) -> SimulationSettings:
    """Engines as on a GPU: up to 8,192 tokens a step."""
    return SimulationSettings(**{"max_step_tokens": 8192, **changes})


def play(
    work: Workload, contender: Contender, device: Device, num_engines: int, settings: SimulationSettings | None = None,
    *, scale: int = 1, on_call: Callable[[PlayedCall], None] = lambda played: None,
) -> PlayedRun:  # fmt: skip
    """Run a workload to its end. `scale` divides its lengths, see `shrunk`: as many times more calls end with a step,
    so as many more may wait."""
    settings = settings or engine_settings()
    clock = VirtualClock()
    rows_seen = _RowCount()
    digests = [StepDigest() for _ in range(num_engines)]
    engines = [simulated_engine(device, settings, clock, [digest, rows_seen]) for digest in digests]
    choice: EngineChoice = LeastQueue(num_engines)
    if contender.routes:
        choice = RouterChoice.of(device, settings, num_engines)
    cluster = SimulatedCluster(engines, clock, choice)
    waiting = min(contender.limits.waiting_calls * num_engines * scale, UNBOUNDED)
    contender = contender._replace(limits=contender.limits._replace(waiting_calls=waiting))
    player = player_of(work, contender, device, settings, cluster, on_call=on_call)
    player.begin()
    cluster.run()
    if player.end_s is None:
        raise RuntimeError("the run did not end")
    stats = [engine.scheduler.stats() for engine in engines]
    counts = player.counts.calls
    return PlayedRun(
        seconds=player.end_s,
        calls=counts.calls,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        prefill_tokens=_sum(stats, "prefill_tokens"),
        output_tokens=counts.output_tokens,
        evictions=_sum(stats, "evictions"),
        preemptions=_sum(stats, "preemptions"),
        rows_per_step=rows_seen.rows / max(rows_seen.steps, 1),
        busy_share=sum(engine.busy_s for engine in engines) / (player.end_s * num_engines),
        digest=" ".join(digest.hexdigest()[:16] for digest in digests),
    )


def player_of(
    work: Workload, contender: Contender, device: Device, settings: SimulationSettings, cluster: SimulatedCluster,
    **options: Any,
) -> WorkflowPlayer:  # fmt: skip
    """A contender with its workload, ready to begin on a cluster."""
    graph = canonical(work.graph if contender.merges else _drawn(work.graph))
    if contender.merges:
        graph = optimise(graph).graph
    order = PlannedOrder(row_by_row(graph))
    state = RunState(graph, order)
    limits = contender.limits
    if contender.by_operator:
        limits = limits._replace(operators=[node.id for node in graph.nodes])
    rounds = None
    if contender.plans:
        engine = PlanEngine(
            MODEL, device.kv_tokens, page_size=device.page_size, max_step_tokens=settings.max_step_tokens,
            forward=device.forward,
        )  # fmt: skip
        known = {node.id: {"output_tokens": node.request["max_tokens"]} for node in graph.nodes}  # type: ignore[union-attr]
        sources = PlanSources(lambda model: _PROMPTS, [engine] * len(cluster.engines), MODEL)
        rounds = PlanRounds(graph, order, sources, known if contender.is_profiled else None)
    return WorkflowPlayer(cluster, state, work.rows, limits, rounds, **options)


def least(work: Workload, device: Device, num_engines: int, settings: SimulationSettings | None = None) -> Floor:
    """What a workload needs at least on these engines, its equal calls made once. Plays it once on an engine with room
    for everything."""
    settings = settings or engine_settings()
    calls: dict[tuple[int, str], Any] = {}

    def note(one: PlayedCall) -> None:
        calls[one.row, one.path] = (unpack_tokens(one.call.prompt), unpack_tokens(one.call.answer))

    roomy = msgspec.structs.replace(device, kv_tokens=ROOMY_TOKENS)
    play(work, CONTENDERS["clients-merged"], roomy, 1, settings, on_call=note)
    steps = settings.max_running, settings.max_step_tokens
    return floor_of(work.graph, calls, FloorEngines(device.forward, device.kv_tokens, *steps, num_engines))


class _RowCount:
    """Rows of steps."""

    def __init__(self) -> None:
        self.rows = self.steps = 0

    def observe(self, step: Any, flight: Any, timing: Any) -> None:
        """As `StepObserver`."""
        self.rows += flight.num_rows
        self.steps += 1


def _drawn(graph: WorkflowGraph) -> WorkflowGraph:
    """The graph without what says that equal calls have equal answers, so that none are merged."""
    raw = graph_to_dict(graph)
    nodes = [{name: value for name, value in node.items() if name != "temperature"} for node in raw["nodes"]]
    return graph_from_dict(raw | {"nodes": nodes})


def _sum(stats: list[EngineStats], name: str) -> int:
    return sum(getattr(each, name) for each in stats)
