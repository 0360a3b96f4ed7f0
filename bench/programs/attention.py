"""Windowed and sink attention against full attention, on long outputs."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from bench.programs.apps import Options
from bench.programs.packing import source_of
from bench.programs.served import Served
from bench.programs.windows import KINDS
from weft.cli.bench.measure import Spread

PROGRAM = "windows"


class Lengths(NamedTuple):
    """Lengths of the texts in tokens."""

    prompt: int = 64
    tokens: int = 1500
    window: int = 256
    sinks: int = 4


async def once(server: Served, kind: str, lengths: Lengths, at_once: int, run: int) -> tuple[float, int]:
    """One run: total tokens per second of all programs after their prompts, and the largest number of KV pages held by
    one."""
    args = {"kind": kind, **lengths._asdict()}
    seeds = [run * 1000 + at for at in range(at_once)]
    answers = await asyncio.gather(*(server.run(PROGRAM, args | {"seed": seed}, wire=server.near) for seed in seeds))
    if any(answer["generated"] != lengths.tokens for answer in answers):
        raise RuntimeError(f"{kind}: programs generated other numbers of tokens than {lengths.tokens}")
    seconds = max(answer["seconds"] for answer in answers)
    return at_once * (lengths.tokens - 1) / seconds, max(answer["pages"] for answer in answers)


async def report_attention(options: Options, lengths: Lengths) -> dict[str, Any]:
    """Measure the kinds of attention and print them."""
    how = "trusted" if options.trusted else "sandboxed"
    print(
        f"attention on {options.model}: {lengths.prompt} + {lengths.tokens} tokens, window {lengths.window}, "
        f"{lengths.sinks} sinks; programs {how}; median of {options.runs}"
    )
    found: dict[str, Any] = {}
    programs = {PROGRAM: source_of("applications", "windows")}
    async with options.serve(programs) as server:
        short = lengths._replace(tokens=min(lengths.tokens, lengths.window + 32))
        for kind in KINDS:
            await once(server, kind, short, 1, 0)
        for at_once in options.programs:
            rates: dict[str, list[float]] = {}
            pages: dict[str, int] = {}
            for run in range(1, options.runs + 1):
                for kind in KINDS:
                    rate, pages[kind] = await once(server, kind, lengths, at_once, run)
                    rates.setdefault(kind, []).append(rate)
            full = Spread.of(rates["full"]).median
            for kind, values in rates.items():
                spread = Spread.of(values)
                print(
                    f"  {at_once:3} at once  {kind:9} {spread.text(1)} tokens/s  {spread.median / full:5.2f} x full  "
                    f"{pages[kind]:4} pages each",
                    flush=True,
                )
                found[f"{kind} x {at_once}"] = {"tokens_per_s": values, "pages": pages[kind]}
    return found
