"""Steps of the simulator per second of one core, for sequences that decode.

    python -m bench.simulator [--sequences 1 64 256] [--steps 1000] [--runs 5] [--mixture | --calls] [--json FILE]

Every step is decided by the scheduler and taken in one behind, as in an engine. Medians over runs are reported, and
their spread. `--calls` counts calls of Python functions per step instead: a figure that another process on the machine
does not change. `--mixture` runs two minutes of arrivals of `weft sim interceptions` instead of sequences that decode
alone, by contender of `bench.simulated_rates` and requests per second.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import alone
from bench.simulations import MixtureCase
from weft.cache.manager import KVCache
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, heading, surroundings, write_record
from weft.sched.scheduler import SchedulerConfig
from weft.sim.clock import VirtualClock
from weft.sim.devices import Device, find_device
from weft.sim.loop import Simulation
from weft.sim.metrics import WasteLedger
from weft.sim.policies import make_scheduler
from weft.sim.records import KnownTokens
from weft.sim.run import VOCAB_SIZE, SimulationSettings, worker_spec
from weft.sim.scripts import SessionScript, TokenSource, TurnScript
from weft.sim.sessions import SessionPlayer
from weft.sim.worker import CostModelWorker

PROMPT_TOKENS = 300
WARM_UP_STEPS = 50
MIXTURE = (("min_waste-host", 0.5), ("min_waste-host", 2.0), ("min_waste", 1.0), ("lru", 3.0))
MIXTURE_MINUTES = 2.0


def decoding(sequences: int, steps: int) -> Simulation:
    """A simulation in which so many sequences decode, for `steps` steps at least."""
    length = PROMPT_TOKENS + steps + 10 * WARM_UP_STEPS + 4 * sequences
    device: Device = find_device("gptj-6b-a100", kv_tokens=(length + 16) * sequences)
    spec = worker_spec(device, SimulationSettings(), length + 1)
    cache = KVCache(spec.num_device_pages, 0, spec.page_size)
    config = SchedulerConfig(max_context=length + 1, max_running=256, max_step_tokens=8192, vocab_size=VOCAB_SIZE)
    scheduler = make_scheduler("lru", config, cache)
    clock, costs, known = VirtualClock(), device.costs(), KnownTokens()
    ledger = WasteLedger(scheduler, cache, costs, known)
    simulation = Simulation(scheduler, CostModelWorker(spec, costs, clock), clock, [ledger])
    player = SessionPlayer(simulation, TokenSource(0, VOCAB_SIZE), known, driving="programs")
    turn = TurnScript(PROMPT_TOKENS, length - PROMPT_TOKENS)
    for number in range(1, sequences + 1):
        player.begin(SessionScript(number, "decode", 0.0, (turn,)), 0.0, lambda record: None)
    while scheduler.sequences.num_decoding < sequences:
        simulation.step()
    for _ in range(WARM_UP_STEPS):
        simulation.step()
    gc.collect()
    return simulation


def steps_per_s(sequences: int, steps: int) -> float:
    """Steps per second of the thread's processor time."""
    simulation = decoding(sequences, steps)
    began = time.thread_time()
    for _ in range(steps):
        simulation.step()
    return steps / (time.thread_time() - began)


def steps_per_s_of(case: MixtureCase) -> float:
    """Steps per second of the thread's processor time, the drawing of sessions included."""
    began = time.thread_time()
    steps: int = case.run()["steps"]
    return steps / (time.thread_time() - began)


def calls_per_step(sequences: int, steps: int) -> float:
    """Calls of functions, those of C included."""
    simulation = decoding(sequences, steps)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        simulation.step()
    profiler.disable()
    return float(pstats.Stats(profiler).total_calls) / steps  # type: ignore[attr-defined]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256], help="that decode (1 64 256)")
    parser.add_argument("--steps", type=int, default=1000, help="of a run (1000)")
    parser.add_argument("--runs", type=int, default=5, help="medians are of so many (5)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--calls", action="store_true", help="count calls per step")
    what.add_argument("--mixture", action="store_true", help="of the mixture of interceptions")
    parser.add_argument("--json", type=Path, help="write the figures to this file too, with machine and versions")
    args = parser.parse_args()
    measure = calls_per_step if args.calls else steps_per_s
    runs: dict[str, Callable[[], float]] = {
        f"{sequences} sequences": functools.partial(measure, sequences, args.steps) for sequences in args.sequences
    }
    if args.mixture:
        cases = [MixtureCase(contender, rate, MIXTURE_MINUTES, seed=0) for contender, rate in MIXTURE]
        runs = {f"{case.contender}, {case.rate:g}/s": functools.partial(steps_per_s_of, case) for case in cases}
    where = surroundings()
    print(heading(where))
    print("calls of a step" if args.calls else f"steps per second of one core; median of {args.runs} runs")
    found: dict[str, Any] = {}
    for name, run in runs.items():
        spread = Spread.of([run() for _ in range(1 if args.calls else args.runs)])
        print(f"  {name:>22} {spread.text(0)}")
        found[name] = list(spread)
    if args.json is not None:
        write_record(args.json, {**where, "command": command_line("bench.simulator"), "results": found})


if __name__ == "__main__":
    alone.require()
    main()
