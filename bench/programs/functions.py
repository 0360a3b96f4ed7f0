"""Figure 7 of the paper: the gain of a function-calling agent by each application-specific optimisation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.programs.afar import complete
from bench.programs.applications import Shape, words
from bench.programs.apps import MANY, Options
from bench.programs.calling import CALLING, STEPS, Prompt
from bench.programs.packing import source_of
from bench.programs.served import DISTANCE_MS, Served
from weft.cli.bench.measure import Spread

PROGRAM = "calling"
TOOL_MS = 90.0
"""What an API takes: that of APIServe's second shortest kind (table 1 there, VE)."""
CLIENT = "client"


async def as_client(server: Served, shape: Shape, seed: int) -> int:
    """Run the agent as a remote client that awaits every API call. Returns the number of generated tokens."""
    tokens, generated = Prompt(shape, seed).tokens(), 0
    for at in range(shape["calls"]):
        said = await complete(server.asked, tokens, shape["call"])
        generated += len(said)
        await server.tool_wire.post("/tool", bytes(len(said)))
        tokens = tokens + said + words(shape["reply"], at)
    return generated


async def once(server: Served, step: str, shape: Shape, seeds: Sequence[int]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until all agents, started together, have ended, and their results. Raises `RuntimeError`
    where tokens or calls are missing."""
    called = server.tools.num_requests
    began = time.perf_counter()
    if step == CLIENT:
        counts = await asyncio.gather(*(as_client(server, shape, seed) for seed in seeds))
        answers: list[dict[str, Any]] = [{"generated": count} for count in counts]
    else:
        about = {"step": step, "shape": shape, "tool_url": f"{server.tool_url}/tool"}
        answers = await asyncio.gather(*(server.run(PROGRAM, about | {"seed": seed}) for seed in seeds))
    seconds = time.perf_counter() - began
    wanted = shape["calls"] * shape["call"]
    if any(answer["generated"] != wanted for answer in answers):
        raise RuntimeError(f"{step}: agents generated other numbers of tokens than {wanted}")
    if server.tools.num_requests - called != len(seeds) * shape["calls"]:
        raise RuntimeError(f"{step}: {server.tools.num_requests - called} calls of APIs were made")
    return seconds, answers


async def measure(
    server: Served, shape: Shape, at_once: int, runs: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Step -> seconds of every run, and the result of the first agent. Steps are measured in alternation."""
    times: dict[str, list[float]] = {}
    notes: dict[str, dict[str, Any]] = {}
    for run in range(0 if at_once < MANY else 1, runs + 1):
        for place, step in enumerate((CLIENT, *STEPS)):
            # Prompts differ between agents and steps, so that no step finds the KV of another.
            seeds = [((run * 8 + place) * 1000 + at) * 7919 + at_once for at in range(at_once)]
            seconds, answers = await once(server, step, shape, seeds)
            notes[step] = answers[0]
            if run:
                times.setdefault(step, []).append(seconds)
    return times, notes


async def report_functions(options: Options, shape: Shape = CALLING, tool_ms: float = TOOL_MS) -> dict[str, Any]:
    """Measure the steps of the agent and print them."""
    how = "trusted" if options.trusted else "sandboxed"
    prompt = len(Prompt(shape, 1).tokens())
    print(
        f"function-calling agent (figure 7) on {options.model}: {prompt} prompt tokens, {shape['calls']} calls of "
        f"{shape['call']} tokens, APIs take {tool_ms:g} ms; programs {how}, client{options.whom} {DISTANCE_MS:g} ms "
        f"away; median of {options.runs}"
    )
    found: dict[str, Any] = {}
    programs = {PROGRAM: source_of("applications", "calling")}
    async with options.serve(programs) as server:
        server.tools.work_s = tool_ms / 1000
        for at_once in options.programs:
            times, notes = await measure(server, shape, at_once, options.runs_of(at_once))
            base = statistics.median(times[CLIENT])
            for step, seconds in times.items():
                spread = Spread.of([at_once / s for s in seconds])
                pages = notes[step].get("most_pages")
                held = f", {pages} pages held, {notes[step]['last_pages']} at the end" if pages else ""
                gain = base / statistics.median(seconds)
                print(
                    f"  {at_once:3} at once  {step:8} {statistics.median(seconds):7.3f} s  {spread.text(2)} agents/s  "
                    f"{gain:5.2f} x the client{held}",
                    flush=True,
                )
                found[f"{step} x {at_once}"] = {"gain": gain, "seconds": seconds, **notes[step]}
    return found
