"""Applications as programs beside the model, against the same logic in a remote client."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from bench.programs.afar import Afar
from bench.programs.applications import APPLICATIONS, SHAPES, Shape
from bench.programs.packing import source_of
from bench.programs.served import DISTANCE_MS, Peer, Served, served
from weft.cli.bench.measure import Spread, pair_ratios

MANY = 64


class Tally(NamedTuple):
    """Tokens that one side had computed for one run of an application."""

    filled: int
    generated: int


class Options(NamedTuple):
    """The options of the measurements."""

    runs: int = 5
    programs: Sequence[int] = (1, 8, 64)
    model: str = "weft-tiny"
    trusted: bool = False
    names: Sequence[str] = tuple(APPLICATIONS)
    threads: int | None = None
    """Threads of the engine's kernels."""
    peer: Peer | None = None
    """The server that clients use, instead of the server that runs the programs."""

    @property
    def whom(self) -> str:
        """Description of the server that clients use."""
        return f" of {self.peer.url}" if self.peer else ""

    def serve(self, programs: Mapping[str, str]) -> AbstractAsyncContextManager[Served]:
        """Run a server with these programs."""
        return served(self.model, programs, trusted=self.trusted, threads=self.threads, peer=self.peer)

    def runs_of(self, at_once: int) -> int:
        """Number of runs: fewer at high concurrency, where times vary less and runs take longer."""
        return self.runs if at_once < MANY else max(1, self.runs - 2)


class Result(NamedTuple):
    """Results of one application at one concurrency: side -> seconds until all are done, for every run."""

    program_s: list[float]
    client_s: list[float]
    client_processor: float
    """Share of the client's own processor time in its seconds: it is taken from a server on the same machine."""
    tally: Tally
    notes: dict[str, Any]


def source_of_application(name: str) -> str:
    """One application as a program of its own."""
    return source_of("applications", "beside", also=f"APPLICATIONS = {{{name!r}: {APPLICATIONS[name].__name__}}}")


async def as_program(server: Served, name: str, shape: Shape, seed: int) -> tuple[Tally, dict[str, Any]]:
    """One run as a program beside the model, launched by a remote client."""
    args = {"app": name, "shape": shape, "seed": seed, "tool_url": f"{server.tool_url}/tool"}
    found = await server.run(name, args)
    return Tally(found.pop("filled"), found.pop("generated")), found


async def as_client(server: Served, name: str, shape: Shape, seed: int) -> Tally:
    """One run in a remote client."""
    world = Afar(server.asked, server.tool_wire)
    await APPLICATIONS[name](world, shape, seed)
    return Tally(world.counted.filled, world.counted.generated)


async def compare(server: Served, name: str, shape: Shape, at_once: int, runs: int) -> Result:
    """Measure both sides in alternating order. Unless many run at once, a warm-up run comes first, which is not
    counted.

    Every run has different texts, so that neither side finds the KV of the other in the prefix index.
    """
    times: dict[str, list[float]] = {"program": [], "client": []}
    counts: set[Tally] = set()
    notes: dict[str, Any] = {}
    processor_s = 0.0
    for run in range(0 if at_once < MANY else 1, runs + 1):
        for place, side in enumerate(("program", "client") if run % 2 else ("client", "program")):
            seeds = [((run * 2 + place) * 1000 + at) * 7919 + at_once for at in range(at_once)]
            began, processor_began = time.perf_counter(), _processor_s()
            if side == "program":
                answers = await asyncio.gather(*(as_program(server, name, shape, seed) for seed in seeds))
                counts |= {count for count, _ in answers}
                notes = answers[0][1]
            else:
                counts |= set(await asyncio.gather(*(as_client(server, name, shape, seed) for seed in seeds)))
            if run:
                times[side].append(time.perf_counter() - began)
                processor_s += (_processor_s() - processor_began) * (side == "client")
    if len(counts) != 1:
        raise RuntimeError(f"{name}: the sides computed different numbers of tokens: {counts}")
    return Result(times["program"], times["client"], processor_s / sum(times["client"]), counts.pop(), notes)


async def report_apps(options: Options) -> dict[str, Any]:
    """Measure the applications and print them."""
    how = "trusted" if options.trusted else "sandboxed"
    print(
        f"applications on {options.model}: programs ({how}) beside the model, and clients of /v1/completions"
        f"{options.whom} {DISTANCE_MS:g} ms away; tools 0 ms away from both; median of {options.runs} "
        f"({options.runs_of(MANY)} from {MANY} at once on)"
    )
    print(f"  {'':10} {'at once':>7} {'tokens':>11}   {'program':26} {'client':26} {'gain':>5}  (pairs)")
    found: dict[str, Any] = {}
    programs = {name: source_of_application(name) for name in options.names}
    async with options.serve(programs) as server:
        for name in options.names:
            for at_once in options.programs:
                result = await compare(server, name, SHAPES[name], at_once, options.runs_of(at_once))
                found[f"{name} x {at_once}"] = show(name, at_once, result)
    return found


def show(name: str, at_once: int, result: Result) -> dict[str, Any]:
    """Print a result and return it as data."""
    ratios = pair_ratios(result.client_s, result.program_s)
    gain = statistics.median(result.client_s) / statistics.median(result.program_s)
    unit: Callable[[float], float] = (lambda s: s) if at_once == 1 else (lambda s: at_once / s)
    sides = [Spread.of([unit(s) for s in seconds]) for seconds in (result.program_s, result.client_s)]
    columns = " ".join(f"{_spread(side):22} {'s  ' if at_once == 1 else '/s '}" for side in sides)
    tokens = f"{result.tally.filled}+{result.tally.generated}"
    notes = "".join(f", {value} {key}" for key, value in result.notes.items())
    pairs = f"({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"  {name:10} {at_once:7} {tokens:>11}   {columns} {gain:5.2f}  {pairs}{notes}", flush=True)
    return {
        "gain": gain,
        "pairs": ratios,
        "program_s": result.program_s,
        "client_s": result.client_s,
        "client_processor_share": result.client_processor,
        "tokens": result.tally._asdict(),
        **result.notes,
    }


def _spread(spread: Spread) -> str:
    return f"{spread.median:7.3g} ({spread.low:.3g} to {spread.high:.3g})"


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
