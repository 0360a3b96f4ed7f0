"""Time that Weft adds to programs, in absolute terms: the device takes a fixed time for each step."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.programs import sources
from bench.programs.rig import Rig, timed_rig
from weft.cli.bench.measure import Spread

STEP_MS = 10.0
KINDS = {"generate": sources.GENERATE, "loop": sources.LOOP, "pages": sources.PAGES}
POLICIES = ("eager", "k", "t", "adaptive")


async def added_per_token(counts: list[int], tokens: int, runs: int) -> dict[tuple[str, int], Spread]:
    """(kind, programs) -> milliseconds added to the device's time, per token of every program and per step. Kinds are
    measured in alternation."""
    found: dict[tuple[str, int], list[float]] = {}
    async with timed_rig(STEP_MS) as rig:
        for count in counts:
            for run in range(runs + 1):
                for kind, source in KINDS.items():
                    began = time.perf_counter()
                    await rig.all(source, {"tokens": tokens}, count)
                    ms = (time.perf_counter() - began) * 1000 / tokens - STEP_MS
                    if run:  # the first warms up
                        found.setdefault((kind, count), []).append(ms)
    return {key: Spread.of(values) for key, values in found.items()}


async def calls(runs: int) -> dict[str, Spread]:
    """Microseconds of a call that only enqueues (processor time of this process, everything up to the socket), and of a
    round trip to an idle engine, as the program sees it."""
    found: dict[str, list[float]] = {}
    async with timed_rig(0.0) as rig:
        for run in range(runs + 1):
            for trusted in (True, False):
                who = "trusted" if trusted else "sandboxed"
                enqueued = await _processor_s(rig, trusted, 20_000) - await _processor_s(rig, trusted, 0)
                trips = await rig.all(sources.ROUND_TRIPS, {"calls": 300}, 1, trusted=trusted)
                if run:
                    found.setdefault(f"enqueue, {who}", []).append(enqueued * 1e6 / 20_000)
                    found.setdefault(f"round trip, {who}", []).append(trips[0] * 1e6)
    return {name: Spread.of(values) for name, values in found.items()}


async def policies(programs: int, tokens: int, runs: int) -> dict[str, Spread]:
    """Completions per second of `programs` fine-grained loops under each batching policy (table 5 of the paper)."""
    found: dict[str, list[float]] = {}
    for run in range(runs):
        for policy in POLICIES:
            async with timed_rig(STEP_MS, policy) as rig:
                await rig.all(sources.LOOP, {"tokens": 4}, programs)
                began = time.perf_counter()
                count = max(1, tokens // 8) if policy == "eager" else tokens
                await rig.all(sources.LOOP, {"tokens": count}, programs)
                seconds = (time.perf_counter() - began) * tokens / count
                found.setdefault(policy, []).append(programs / seconds)
        del run
    return {policy: Spread.of(values) for policy, values in found.items()}


async def _processor_s(rig: Rig, trusted: bool, calls: int) -> float:
    began = time.process_time()
    await rig.all(sources.ENQUEUE, {"calls": calls}, 1, trusted=trusted)
    return time.process_time() - began


Section = Callable[[int], Awaitable[dict[str, Any]]]


async def report_costs(runs: int, counts: list[int], tokens: int) -> dict[str, Any]:
    """Measure the time added per token and print it."""
    print(f"added to a step of {STEP_MS:g} ms, in ms per token of every program; {tokens} tokens, {runs} runs")
    table = await added_per_token(counts, tokens, runs)
    for (kind, count), spread in table.items():
        share = spread.median / (STEP_MS + spread.median)
        print(f"  {kind:9} {count:4} programs {spread.text(2)}   {share:6.1%} of the time")
    return {f"{kind} x {count}": list(spread) for (kind, count), spread in table.items()}


async def report_calls(runs: int) -> dict[str, Any]:
    """Measure single calls and print them."""
    print("calls, in microseconds")
    table = await calls(runs)
    for name, spread in table.items():
        print(f"  {name:24} {spread.text(1)}")
    return {name: list(spread) for name, spread in table.items()}


async def report_policies(runs: int, programs: int, tokens: int) -> dict[str, Any]:
    """Measure the batching policies and print them."""
    print(f"batching policies: completions of {tokens} tokens per second, {programs} fine-grained loops")
    table = await policies(programs, tokens, runs)
    for name, spread in table.items():
        print(f"  {name:9} {spread.text(2)}")
    return {name: list(spread) for name, spread in table.items()}
