"""Host time of a step, and the part of it that is not overlapped with the device.

    python -m bench.host_cost [SECTION ...] [--runs 5] [--sequences 1 32 128 256] [--json FILE]

`steps`, `commands` and `admission` measure an engine on a fake worker, in CPU time of its thread:
a step of sequences that decode, a single command of a program (from its bytes on the socket to its answer's), and a
prompt that the prefix index knows. `interception` measures steps of 256 decoding sequences beside 2,000 intercepted
ones, each of whose new pages is taken from one that waits. `arrivals` measures the scheduler alone, in simulated
sessions that call tools and come back (the requests of `bench.interception` on a device, on the profile of an H100):
what it takes to decide a step, with a tier for all KV. `overlap` is about the same engine on a worker whose steps take
10 ms: how much longer than 10 ms a step takes, with the next one prepared meanwhile and without. `kernels` decodes with
a real model (random weights in the shape of Qwen3-0.6B) on this machine's processor: see `bench.host_kernels`.

Sections, sizes and settings take turns within a run; medians over runs are reported, and their spread.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench import alone
from bench.programs.timed_engine import TimedWorker
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, heading, surroundings, write_record
from weft.cli.bench.shapes import drawn_sessions
from weft.core import wire
from weft.core.clock import ManualClock
from weft.core.cost.model import CostModel, ForwardModel, SwapModel
from weft.core.ids import pack_tokens
from weft.core.protocols import WorkerSpec
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.engine import Engine, Publish
from weft.sched.policies import make_policy
from weft.sched.scheduler import Scheduler, SchedulerConfig
from weft.sim.devices import profiled_device
from weft.sim.run import SimulationSettings, simulate

PROMPT_TOKENS = 250
STEP_MS = 10.0
MAX_RUNNING = 256
VOCAB_SIZE = 32_000
DIST = 256
"""Tokens of the distributions that programs ask for."""
INTERCEPTED = 2000
PAGE_SIZE = 16
WAITING_PAGES = 8
"""Of an intercepted sequence."""
PRESSED_STEPS = 200
WAITED_STEP_S = 0.02
"""How long such a step takes on the device."""
SECTIONS = ("steps", "overlap", "commands", "admission", "interception", "arrivals", "kernels")
PROFILE = Path(__file__).parent / "results" / "profile-llama-3-8b-h100.json"
ARRIVALS, POOL_TOKENS, TIER_TOKENS = (400, 2.5, (120.0, 146.0)), 51_840, 155_520
"""Sessions, their rate per second and the window of it that is played; KV tokens of the device and of the host tier. As
on the H200 of docs/benchmarks.md, but `PROFILE` is of an H100."""


def encoded(client: int, envelope: wire.Envelope) -> None:
    """Make bytes of what an engine tells."""
    wire.encode_envelope(envelope)


def make_engine(
    step_s: float = 0.0,
    *,
    num_pages: int = 20_000,
    num_host_pages: int = 0,
    publish: Publish = encoded,
    **options: Any,
) -> Engine:
    """An engine that computes nothing."""
    spec = WorkerSpec(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        page_size=PAGE_SIZE,
        num_device_pages=num_pages,
        num_host_pages=num_host_pages,
        num_slots=2 * MAX_RUNNING,
        num_embed_slots=4096,
        max_context=8192,
        bytes_per_page=1,
        device="none",
        dtype="none",
    )
    config = SchedulerConfig(max_context=8192, max_running=MAX_RUNNING, max_step_tokens=8192, vocab_size=VOCAB_SIZE)
    return Engine(TimedWorker(spec, step_s), config, publish, **options)


def request(seq: int, tokens: list[int], limit: int, tenant: str = "") -> list[wire.Command]:
    """A generation of `limit` tokens."""
    stop = StopParams(max_tokens=limit, ignore_eos=True)
    return [
        wire.Open(seq=seq, tenant=tenant, namespace=tenant),
        wire.Append(seq=seq, op=2 * seq, tokens=pack_tokens(tokens)),
        wire.Generate(seq=seq, op=2 * seq + 1, sampling=SamplingParams(seed=1), stop=stop),
    ]


def decoding_engine(sequences: int, steps: int, step_s: float = 0.0, *, overlap: bool = True) -> Engine:
    """One with `sequences` that decode, for `steps` at least."""
    engine = make_engine(step_s, overlap=overlap)
    generator = np.random.default_rng(0)
    for seq in range(1, sequences + 1):
        engine.submit(1, request(seq, generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist(), steps + 1000))
    while len(engine.scheduler.sequences.decoding().sequences) < sequences:
        engine.step()
    gc.collect()
    for _ in range(5):
        engine.step()
    return engine


def decode_us(sequences: int, steps: int = 300) -> float:
    """Processor microseconds of a step with `sequences` that decode: mean, so that full pages count as often as they
    fill."""
    engine = decoding_engine(sequences, steps)
    began = time.thread_time()
    for _ in range(steps):
        engine.step()
    return (time.thread_time() - began) / steps * 1e6


def beyond_step_us(sequences: int, *, overlap: bool, steps: int = 60) -> float:
    """Microseconds that a step takes beyond the device's."""
    engine = decoding_engine(sequences, steps, STEP_MS / 1000, overlap=overlap)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - began) / steps * 1e6 - STEP_MS * 1000


def sleep_us(steps: int = 60) -> float:
    """Microseconds that the operating system lets a thread sleep beyond the requested time: a part of every step
    without overlap that an engine cannot avoid."""
    began = time.perf_counter()
    for _ in range(steps):
        time.sleep(STEP_MS / 1000)
    return (time.perf_counter() - began) / steps * 1e6 - STEP_MS * 1000


def admission_us(rounds: int = 50) -> float:
    """Microseconds to take in, look up, admit and build a 4,000-token prompt that is cached: median of `rounds`."""
    engine = make_engine()
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, VOCAB_SIZE, 4000).tolist()
    times = []
    for seq in range(1, rounds + 2):
        commands = request(seq, [*prompt, 7, seq], 1)
        began = time.thread_time()
        engine.submit(1, commands)
        engine.step()
        times.append((time.thread_time() - began) * 1e6)
        while engine.busy:
            engine.step()
        engine.submit(1, [wire.Release(seq=seq)])
        engine.step()
    return statistics.median(times[1:])


# Interception


def waiting_engine(
    policy: str, *, is_short: bool, num_host_pages: int = 0, tenants: int = 1, waiting: int = INTERCEPTED
) -> tuple[Engine, ManualClock]:
    """One with as many decoding sequences as it may run, beside `waiting` intercepted ones of 121 tokens: half of them
    turns of clients, the others programs that wait for a tool. `is_short`: each page that the decoding ones fill is one
    that an intercepted one gives up; else there are enough for all."""
    clock, generator = ManualClock(), random.Random(0)
    num_pages = waiting * WAITING_PAGES + MAX_RUNNING * -(-PROMPT_TOKENS // PAGE_SIZE) + 2 * MAX_RUNNING
    num_pages += 0 if is_short else MAX_RUNNING * PRESSED_STEPS // PAGE_SIZE
    chooser, kinds = make_policy(policy), ("chat", "tools:read", "tools:shell", "http", "sleep", "prefix", "unused")
    for tenant in range(tenants):
        for kind in kinds:
            for _ in range(64):
                chooser.observe(f"tenant {tenant}", kind, generator.lognormvariate(2.0, 1.0))
    forward = ForwardModel(0.01, 0.0, 1e-5, 1e-5, 1e-7, 1e-7, 1e-9, (64, 384, 2048), (1e-6, 1e-5, 4.6e-5, 4.6e-5))
    swap = SwapModel(1e-4, 3e-4)
    engine = make_engine(
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        clock=clock,
        cost_model=CostModel(forward, swap, swap, 384),
        intercept=chooser,
    )

    def work_off() -> None:
        while engine.busy:
            engine.step()
            clock.advance(WAITED_STEP_S)

    for first in range(1, waiting + 1, MAX_RUNNING):
        seqs = range(first, min(first + MAX_RUNNING, waiting + 1))
        for seq in seqs:
            tenant = f"tenant {seq % tenants}"
            tokens = [generator.randrange(VOCAB_SIZE) for _ in range(PAGE_SIZE * WAITING_PAGES - 8)]
            engine.submit(1, request(seq, tokens, 1, tenant=tenant))
        work_off()
        for seq in seqs:
            if seq % 2:
                engine.submit(1, [wire.Release(seq=seq, kind=generator.choice(kinds[:3]))])
            else:
                engine.submit(1, [wire.Expect(seq=seq, kind=generator.choice(kinds[3:5]))])
        work_off()
    for seq in range(waiting + 1, waiting + 1 + MAX_RUNNING):
        tokens = [generator.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        engine.submit(1, request(seq, tokens, PRESSED_STEPS + 1000, tenant=f"tenant {seq % tenants}"))
    while len(engine.scheduler.sequences.decoding().sequences) < MAX_RUNNING:
        engine.step()
        clock.advance(WAITED_STEP_S)
    return engine, clock


def waited_step_us(policy: str, steps: int = PRESSED_STEPS, **options: Any) -> float:
    """Processor microseconds of a step of `waiting_engine`: mean, so that full pages and the order of all that waits
    count as often as they come.

    Raises `RuntimeError` where pages were given up though there were enough, or none though there were not.
    """
    engine, clock = waiting_engine(policy, **options)
    tiers = engine.cache.tiers
    while options["is_short"] and tiers.device.num_free > MAX_RUNNING // PAGE_SIZE:
        engine.step()
        clock.advance(WAITED_STEP_S)
    gc.collect()
    evicted = tiers.num_evicted
    seconds = 0.0
    for _ in range(steps):
        began = time.thread_time()
        engine.step()
        seconds += time.thread_time() - began
        clock.advance(WAITED_STEP_S)
    if (tiers.num_evicted > evicted) is not options["is_short"]:
        raise RuntimeError(f"{tiers.num_evicted - evicted} pages were given up in {steps} steps")
    return seconds / steps * 1e6


def deciding_us(policy: str) -> dict[str, float]:
    """Processor microseconds of a call of `Scheduler.schedule` in simulated sessions: mean, and what a tenth of the
    calls takes longer than. One in thirty makes no step."""
    times: list[float] = []
    schedule = Scheduler.schedule

    def timed(scheduler: Scheduler, now: float) -> Any:
        began = time.thread_time()
        found = schedule(scheduler, now)
        times.append((time.thread_time() - began) * 1e6)
        return found

    count, rate, span = ARRIVALS
    sessions = drawn_sessions("mixture", count, rate, (1.0, 1.0), 0, span)
    settings = SimulationSettings(policy=policy, driving="clients", host_tokens=TIER_TOKENS)
    gc.collect()
    with mock.patch.object(Scheduler, "schedule", timed):
        simulate(profiled_device(PROFILE, POOL_TOKENS), sessions, settings)
    return {"mean": statistics.fmean(times), "90 %": float(np.percentile(times, 90))}


# Single commands of programs


def _u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


class Loops:
    """As many programs at once as are asked for, each of which makes one token in every turn."""

    def __init__(self, programs: int):
        self.programs = range(1, programs + 1)
        self.ops = count(1)

    def begin(self) -> Iterator[wire.Command]:
        """What each needs before its first turn."""
        for number in self.programs:
            yield wire.Open(seq=number)

    def turn(self, program: int, position: int) -> list[wire.Command]:
        """Look at the distribution after one more token of a sequence."""
        outputs = wire.PromptOutputs(dist=DIST)
        return [wire.Append(seq=program, op=next(self.ops), tokens=pack_tokens([5]), outputs=outputs)]


class Pages(Loops):
    """Embed, forward over explicit pages, look at the distribution: three commands a token."""

    def begin(self) -> Iterator[wire.Command]:
        """A queue, pages, and one embedding."""
        for space in self.programs:
            yield wire.OpenSpace(space=space, op=next(self.ops))
            yield wire.OpenQueue(space=space, queue=1, op=next(self.ops))
            yield wire.AllocPages(space=space, queue=1, op=next(self.ops), first=1, count=16)
            yield wire.AllocEmbeds(space=space, queue=1, op=next(self.ops), first=1, count=1)

    def turn(self, program: int, position: int) -> list[wire.Command]:
        """The commands of one token: embed, forward, distribution."""
        on: dict[str, Any] = {"space": program, "queue": 1}
        last, one = position // 16 + 1, _u32(1)
        read, at = _u32(*range(1, last + 1)), pack_tokens([position])
        return [
            wire.EmbedText(**on, op=next(self.ops), tokens=pack_tokens([5]), positions=at, embeds=one),
            wire.Forward(**on, op=next(self.ops), read=read, inputs=one, write=_u32(last), outputs=one),
            wire.NextDist(**on, op=next(self.ops), k=DIST, embeds=one),
        ]


class Samples(Pages):
    """One command a token: a forward over explicit pages that samples."""

    def turn(self, program: int, position: int) -> list[wire.Command]:
        """The command of one token: a forward that samples."""
        last = position // 16 + 1
        return [
            wire.ForwardSample(
                space=program,
                queue=1,
                op=next(self.ops),
                read=_u32(*range(1, last + 1)),
                tokens=pack_tokens([5]),
                positions=pack_tokens([position]),
                write=_u32(last),
                sampling=SamplingParams(seed=position),
            )
        ]


KINDS: dict[str, Callable[[int], Loops]] = {"next_dist": Loops, "pages": Pages, "forward_sample": Samples}


def command_us(kind: str, programs: int, turns: int = 100) -> float:
    """Processor microseconds of the engine per program and token, from the bytes of the commands to those of the
    answers. Raises `RuntimeError` where not every token was answered."""
    answers = Counter[str]()

    def publish(client: int, envelope: wire.Envelope) -> None:
        wire.encode_envelope(envelope)
        answers.update(type(event).__name__ for event in envelope.events)

    engine, loops = make_engine(publish=publish), KINDS[kind](programs)
    engine.submit(1, loops.begin())
    messages = [
        [wire.encode_commands(loops.turn(program, position)) for program in loops.programs]
        for position in range(turns + 5)
    ]
    gc.collect()
    began = 0.0
    for position, turn in enumerate(messages):
        if position == 5:
            began = time.thread_time()
        for message in turn:
            engine.submit(1, wire.decode_commands(message))
        while engine.busy:
            engine.step()
    seconds = time.thread_time() - began
    if answers["Finished"] < (turns + 5) * programs:
        raise RuntimeError(f"{(turns + 5) * programs} tokens were asked for, and answered by {dict(answers)}")
    return seconds / turns / programs * 1e6


# The report

WAITED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("pages enough for all", "min_waste", {"is_short": False}),
    ("no page to spare, lru", "lru", {"is_short": True}),
    ("no page to spare, min_waste", "min_waste", {"is_short": True}),
    ("no page to spare, min_waste, 4,000 pages on the host", "min_waste", {"is_short": True, "num_host_pages": 4000}),
    ("no page to spare, min_waste, 8 tenants", "min_waste", {"is_short": True, "tenants": 8}),
)
"""Row, policy, and options of `waiting_engine`."""


def measure(args: argparse.Namespace) -> dict[str, dict[str, Spread]]:
    """By section and row, in microseconds."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(section: str, row: str, value: float) -> None:
        found.setdefault(section, {}).setdefault(row, []).append(value)

    for _ in range(args.runs):
        for sequences in args.sequences:
            if "steps" in args.sections:
                note("steps", f"{sequences:4d} sequences", decode_us(sequences))
            if "overlap" in args.sections:
                for overlap in (True, False):
                    row = f"{sequences:4d} sequences, {'overlapped' if overlap else 'one after the other'}"
                    note("overlap", row, beyond_step_us(sequences, overlap=overlap))
            if "commands" in args.sections and sequences <= MAX_RUNNING:
                for kind in KINDS:
                    note("commands", f"{sequences:4d} programs, {kind}", command_us(kind, sequences))
        if "overlap" in args.sections:
            note("overlap", "what a thread oversleeps", sleep_us())
        if "admission" in args.sections:
            note("admission", "a cached prompt of 4,000 tokens", admission_us())
        if "interception" in args.sections:
            for row, policy, options in WAITED:
                note("interception", row, waited_step_us(policy, **options))
        if "arrivals" in args.sections:
            for policy in ("lru", "min_waste"):
                for row, value in deciding_us(policy).items():
                    note("arrivals", f"{policy}, {row}", value)
    return {
        section: {row: Spread.of(values) for row, values in sorted(rows.items())} for section, rows in found.items()
    }


TITLES = {
    "steps": "a step of sequences that decode, us of processor",
    "overlap": f"a step of sequences that decode on a device that takes {STEP_MS:g} ms: us beyond that",
    "commands": "a token of a program that asks for each, us of the engine's processor per program",
    "admission": "taking in, us of processor",
    "interception": f"a step of {MAX_RUNNING} sequences beside {INTERCEPTED:,} intercepted ones, us of processor",
    "arrivals": "deciding a step of sessions that come back, us of processor",
}


def main() -> None:
    """Measure the chosen sections and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.host_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--runs", type=int, default=5, help="medians are of so many (5)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 128, 256], help="at once (1 32 128 256)")
    parser.add_argument("--decoding", type=int, default=64, help="kernels: sequences at once (64)")
    parser.add_argument("--threads", type=int, help="kernels: of the processor (as weft serve would use)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too, with machine and versions")
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    args.sections = args.sections or list(SECTIONS)
    where = surroundings()
    print(heading(where))
    found: dict[str, Any] = {}
    for section, rows in measure(args).items():
        print(f"{TITLES[section]}; median of {args.runs} runs")
        for row, spread in rows.items():
            print(f"  {row:56} {spread.text(1)}")
        found[section] = {row.strip(): list(spread) for row, spread in rows.items()}
    if "kernels" in args.sections:
        from bench import host_kernels  # imports torch, which the other sections do not need

        found["kernels"] = host_kernels.report(args.decoding, args.runs, args.threads)
    if args.json is not None:
        write_record(args.json, {**where, "command": command_line("bench.host_cost"), "results": found})


if __name__ == "__main__":
    alone.require()
    main()
