"""Puts a simulation together: a device, a policy, and sessions that are played to their end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from weft.abi.errors import ConfigError
from weft.cache.manager import KVCache
from weft.core.protocols import WorkerSpec
from weft.core.wire import EngineStats
from weft.sched.scheduler import SchedulerConfig
from weft.sched.sequence import ReturnOrder
from weft.sim.cheapest import cheapest_waste
from weft.sim.clock import VirtualClock
from weft.sim.devices import Device
from weft.sim.engine import SimulatedEngine, StepObserver
from weft.sim.loop import Simulation, StepDigest
from weft.sim.metrics import Summary, WasteLedger, summarise
from weft.sim.policies import make_scheduler
from weft.sim.records import KnownTokens, SessionRecord
from weft.sim.scripts import SessionScript, TokenSource, with_subagents
from weft.sim.sessions import Driving, SessionPlayer
from weft.sim.worker import CostModelWorker

VOCAB_SIZE = 32_000


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine of a simulation is set up."""

    policy: str = "lru"
    estimator: str = "learned"
    """How `min_waste` estimates waits. `oracle` is told every wait."""
    driving: Driving = "programs"
    host_tokens: int = 0
    """KV tokens of the host tier; 0: none."""
    max_running: int = 256
    max_step_tokens: int = 2048
    synchronous_swaps: bool = False
    saturate: bool = True
    """Prompts wait from the device's saturation point on."""
    latency_factor: float = 1.5
    min_share: float = 0.1
    latency_s: float = 0.0
    """From when a turn is due until the engine has it."""
    overlap: bool = True
    return_order: ReturnOrder = "fair"
    to_end: bool = True
    """False: it stops when no more sessions arrive, and knows only those that have ended."""


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Records of all sessions, and the engine's figures at the end."""

    summary: Summary
    records: list[SessionRecord]
    scheduler_stats: EngineStats
    """What the scheduler has counted itself."""
    digest: str
    """A hash over all steps; empty where none was asked for."""


def simulate(
    device: Device,
    scripts: Sequence[SessionScript],
    settings: SimulationSettings,
    *,
    seed: int = 0,
    arrivals_s: float | None = None,
    with_digest: bool = False,
    on_done: Callable[[SessionRecord], None] = lambda record: None,
) -> SimulationResult:
    """Play sessions until all have ended, or as the settings say. `on_done` is called with each record.

    `arrivals_s` is how long sessions arrive; None: until the last one does. Raises `ConfigError` for an unknown policy
    and for a session that is longer than the pool.
    """
    longest = max((script.num_tokens for script in with_subagents(scripts)), default=1)
    if longest > device.num_pages * device.page_size:
        raise ConfigError(
            f"the longest session has {longest} tokens, and the device has room for {device.kv_tokens} tokens of KV"
        )
    config = scheduler_config(device, settings, longest + 1, seed)
    spec = worker_spec(device, settings, config.max_context)
    cache = KVCache(spec.num_device_pages, spec.num_host_pages, spec.page_size)
    clock, costs, known = VirtualClock(), device.costs(), KnownTokens()
    scheduler = make_scheduler(settings.policy, config, cache, costs, settings.estimator)
    ledger = WasteLedger(scheduler, cache, costs, known)
    digest = StepDigest()
    simulation = Simulation(
        scheduler,
        CostModelWorker(spec, costs, clock, synchronous_swaps=settings.synchronous_swaps),
        clock,
        [ledger, digest] if with_digest else [ledger],
        overlap=settings.overlap,
    )
    player = SessionPlayer(
        simulation,
        TokenSource(seed, VOCAB_SIZE),
        known,
        driving=settings.driving,
        announces=settings.estimator == "oracle",
        latency_s=settings.latency_s,
        on_done=on_done,
    )
    player.add(scripts)
    arrivals_s = arrivals_s or max((script.arrive_s for script in scripts), default=0.0) or 1.0
    simulation.run(math.inf if settings.to_end else arrivals_s)
    load = ledger.pressed_load(config.saturation_tokens)
    return SimulationResult(
        summary=summarise(
            player.records,
            ledger,
            arrivals_s=arrivals_s,
            steps=simulation.engine.num_steps,
            simulated_s=clock.now(),
            cheapest_waste=cheapest_waste(scripts, player.records, ledger.pressed, load),
        ),
        records=player.records,
        scheduler_stats=scheduler.stats(),
        digest=digest.hexdigest() if with_digest else "",
    )


def scheduler_config(device: Device, settings: SimulationSettings, max_context: int, seed: int) -> SchedulerConfig:
    """What bounds the steps of a simulated engine, whose sequences have at most `max_context` tokens."""
    return SchedulerConfig(
        max_context=max_context,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
        saturation_tokens=device.saturation_tokens if settings.saturate else None,
        max_waiting=1 << 30,
        vocab_size=VOCAB_SIZE,
        latency_factor=settings.latency_factor,
        min_share=settings.min_share,
        seed=seed,
        return_order=settings.return_order,
    )


def simulated_engine(
    device: Device,
    settings: SimulationSettings,
    clock: VirtualClock,
    observers: Sequence[StepObserver] = (),
    *,
    prefix_cache: bool = True,
) -> SimulatedEngine:
    """An engine of its own on a clock that others may share. Its sequences have as many tokens as fit."""
    max_context = device.num_pages * device.page_size
    config = scheduler_config(device, settings, max_context, seed=0)
    config = msgspec.structs.replace(config, prefix_cache=prefix_cache)
    spec = worker_spec(device, settings, max_context)
    cache = KVCache(spec.num_device_pages, spec.num_host_pages, spec.page_size)
    costs = device.costs()
    scheduler = make_scheduler(settings.policy, config, cache, costs, settings.estimator)
    worker = CostModelWorker(spec, costs, clock, synchronous_swaps=settings.synchronous_swaps)
    return SimulatedEngine(scheduler, worker, clock, observers)


def worker_spec(device: Device, settings: SimulationSettings, max_context: int) -> WorkerSpec:
    """The sizes of a simulated worker."""
    return WorkerSpec(
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        page_size=device.page_size,
        num_device_pages=device.num_pages,
        num_host_pages=settings.host_tokens // device.page_size,
        num_slots=settings.max_running,
        num_embed_slots=0,
        max_context=max_context,
        bytes_per_page=device.bytes_per_page,
        device=device.name,
        dtype="none",
    )
