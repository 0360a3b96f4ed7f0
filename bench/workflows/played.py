"""Workflows on simulated engines: who runs them, and the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from bench.workflows.floor import Floor, FloorEngines, floor_of
from bench.workflows.shapes import Workload
from weft.core.ids import unpack_tokens
from weft.core.wire import EngineStats
from weft.sim.clock import VirtualClock
from weft.sim.cluster import EngineChoice, LeastQueue, RouterChoice, SimulatedCluster
from weft.sim.devices import Device
from weft.sim.engine import StepObserver
from weft.sim.loop import StepDigest
from weft.sim.run import SimulationSettings, simulated_engine
from weft.sim.workflow_run import PlayedCall, PlayerLimits, SpelledPrompts, WorkflowPlayer
from weft.workflow.graph import WorkflowGraph, canonical, graph_from_dict, graph_to_dict
from weft.workflow.passes import optimise
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.order import no_hints, row_by_row
from weft.workflow.run.plan_rounds import PlanRounds, PlanSources
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.settings import NO_PLANS, PlanSettings
from weft.workflow.run.state import RunState

MODEL = "simulated"
_AT_ONCE = Concurrency()
ROOMY_TOKENS = 20_000_000
SPELLED = SpelledPrompts()


class Contender(NamedTuple):
    """Who runs a workflow."""

    merges: bool = False
    """Whether equal calls are made once."""
    planning: PlanSettings = NO_PLANS
    """What of plans is followed; without their order calls leave row by row."""
    is_service: bool = False
    """Whether the calls are the service's, which says what they are for, else those of any client."""
    limits: PlayerLimits = PlayerLimits()
    """Of one engine."""
    routes: bool = False
    """Whether calls go where the router of `weft serve` sends them, else to the engine with the fewest."""
    by_operator: bool = False
    is_profiled: bool = False
    """Whether the lengths of answers are known, else a sample of the rows shows them."""
    continues: bool = True
    """Whether the KV of answers is found, else that of prompts alone."""
    cache: Literal["none", "cold", "warm"] = "none"
    """Of answers of earlier calls. A warm one has those of a run whose rows differ in every second input."""
    policy: str = "min_waste"
    """Of the engines: whose KV goes."""


_WEFT = Contender(True, PlanSettings(), True, PlayerLimits(_AT_ONCE.rows, _AT_ONCE.waiting_calls, _AT_ONCE.calls), True)
CONTENDERS: Mapping[str, Contender] = {
    "weft": _WEFT,
    "clients": Contender(),
    "query-wise": Contender(limits=PlayerLimits(rows=1)),
    "operator-wise": Contender(by_operator=True),
    "clients-merged": Contender(True),
    "clients-routed": Contender(routes=True),
    "weft-profiled": _WEFT._replace(is_profiled=True),
    "weft-unplanned": _WEFT._replace(planning=NO_PLANS),
    "weft-no-order": _WEFT._replace(planning=PlanSettings(order=False)),
    "weft-no-pins": _WEFT._replace(planning=PlanSettings(pins=False)),
    "weft-no-turns": _WEFT._replace(planning=PlanSettings(turns=False)),
    "weft-no-engines": _WEFT._replace(planning=PlanSettings(engines=False)),
    "weft-not-continued": _WEFT._replace(continues=False),
    "weft-all-at-once": _WEFT._replace(limits=PlayerLimits(_AT_ONCE.rows)),
    "weft-unmerged": _WEFT._replace(merges=False),
    "weft-least-queue": _WEFT._replace(routes=False),
    "weft-cache-cold": _WEFT._replace(cache="cold"),
    "weft-cache-warm": _WEFT._replace(cache="warm"),
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
    pinned_tokens: int
    """Of prefixes that engines agreed to keep."""
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
    *, scale: int = 1, prompts: SpelledPrompts = SPELLED, on_call: Callable[[PlayedCall], None] = lambda played: None,
) -> PlayedRun:  # fmt: skip
    """Run a workload to its end. `scale` divides its lengths, see `shrunk`: as many times more calls end with a step,
    so as many more may wait."""
    settings = settings or engine_settings(policy=contender.policy)
    cache: dict[str, ModelAnswer] | None = None if contender.cache == "none" else {}
    options: dict[str, Any] = {"scale": scale, "cache": cache, "prompts": prompts}
    if contender.cache == "warm":
        earlier = work._replace(rows=tuple(map(_of_another_day, work.rows)))
        cluster = cluster_of(contender, device, settings, [[]] * num_engines)
        _run(player_of(earlier, contender, device, settings, cluster, **options), cluster)
    rows_seen = _RowCount()
    digests = [StepDigest() for _ in range(num_engines)]
    cluster = cluster_of(contender, device, settings, [[digest, rows_seen] for digest in digests])
    player = player_of(work, contender, device, settings, cluster, on_call=on_call, **options)
    seconds = _run(player, cluster)
    stats = [engine.scheduler.stats() for engine in cluster.engines]
    counts = player.counts.calls
    return PlayedRun(
        seconds=seconds,
        calls=counts.calls,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        prefill_tokens=_sum(stats, "prefill_tokens"),
        output_tokens=counts.output_tokens,
        evictions=_sum(stats, "evictions"),
        preemptions=_sum(stats, "preemptions"),
        rows_per_step=rows_seen.rows / max(rows_seen.steps, 1),
        busy_share=sum(engine.busy_s for engine in cluster.engines) / (seconds * num_engines),
        pinned_tokens=player.counts.pins.tokens,
        digest=" ".join(digest.hexdigest()[:16] for digest in digests),
    )


def cluster_of(
    contender: Contender, device: Device, settings: SimulationSettings, observers: Sequence[Sequence[StepObserver]]
) -> SimulatedCluster:
    """An engine for each of `observers`."""
    clock = VirtualClock()
    engines = [simulated_engine(device, settings, clock, each) for each in observers]
    choice: EngineChoice = LeastQueue(len(engines))
    if contender.routes:
        choice = RouterChoice.of(device, settings, len(engines))
    return SimulatedCluster(engines, clock, choice)


def _run(player: WorkflowPlayer, cluster: SimulatedCluster) -> float:
    """Seconds of a run."""
    player.begin()
    cluster.run()
    if player.end_s is None:
        raise RuntimeError("the run did not end")
    return player.end_s


def _of_another_day(row: Mapping[str, str]) -> dict[str, str]:
    """The row with every second of its inputs changed."""
    return {name: value if index % 2 else value[::-1] for index, (name, value) in enumerate(row.items())}


def player_of(
    work: Workload, contender: Contender, device: Device, settings: SimulationSettings, cluster: SimulatedCluster,
    *, scale: int = 1, prompts: SpelledPrompts = SPELLED, **options: Any,
) -> WorkflowPlayer:  # fmt: skip
    """A contender with its workload, ready to begin on a cluster."""
    graph = canonical(work.graph if contender.merges else _drawn(work.graph))
    if contender.merges:
        graph = optimise(graph).graph
    planning, limits = contender.planning, contender.limits
    order = PlannedOrder(row_by_row(graph), planning)
    state = RunState(graph, order, hints=order.hints if contender.is_service else no_hints)
    if contender.by_operator:
        limits = limits._replace(operators=[node.id for node in graph.nodes])
    rounds = None
    if planning.needs_plans:
        known = {node.id: {"output_tokens": node.request["max_tokens"]} for node in graph.nodes}  # type: ignore[union-attr]
        sources = sources_of(device, settings, len(cluster.engines), prompts)
        rounds = PlanRounds(graph, order, sources, known if contender.is_profiled else None, planning)
    count = len(cluster.engines)
    limits = limits._replace(waiting_calls=limits.waiting_calls * count * scale, calls=limits.calls * count)
    options |= {"continues": contender.continues, "prompts": prompts}
    return WorkflowPlayer(cluster, state, work.rows, limits, rounds, **options)


def sources_of(
    device: Device, settings: SimulationSettings, num_engines: int, prompts: SpelledPrompts = SPELLED
) -> PlanSources:
    """What plans for equal engines are made of."""
    engines = [
        PlanEngine(
            MODEL, device.kv_tokens, page_size=device.page_size, max_step_tokens=settings.max_step_tokens,
            forward=device.forward, replica=replica,
        )
        for replica in range(num_engines)
    ]  # fmt: skip
    return PlanSources(lambda model: prompts, engines, MODEL)


def least(
    work: Workload, device: Device, num_engines: int, settings: SimulationSettings | None = None,
    prompts: SpelledPrompts = SPELLED,
) -> Floor:  # fmt: skip
    """What a workload needs at least on these engines, its equal calls made once. Plays it once on an engine with room
    for everything."""
    settings = settings or engine_settings()
    calls: dict[tuple[int, str], Any] = {}

    def note(one: PlayedCall) -> None:
        calls[one.row, one.path] = (unpack_tokens(one.call.prompt), unpack_tokens(one.call.answer))

    roomy = msgspec.structs.replace(device, kv_tokens=ROOMY_TOKENS)
    play(work, CONTENDERS["clients-merged"], roomy, 1, settings, prompts=prompts, on_call=note)
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
