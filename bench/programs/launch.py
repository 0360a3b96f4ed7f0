"""Launches: one beside many others that are paused, bursts, and the memory of programs that wait.

The host is in this process and is driven directly: what HTTP adds to a launch is a request. A launch begins with the
call of the host and ends with the arrival of the program's first message.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import psutil

from bench.programs import sources
from bench.programs.rig import Rig, timed_rig
from weft.cli.bench.measure import Spread
from weft.programs.host.process import calm_collector
from weft.programs.run.runs import Run

MIB = 2**20


class Kind(NamedTuple):
    """A program that sends a message and then waits, in one of three forms."""

    name: str
    code: str | bytes
    trusted: bool


class Sizes(NamedTuple):
    """Numbers of programs in the measurements."""

    burst: int = 896
    paused: int = 1000
    singles: int = 30


def kinds() -> list[Kind]:
    """Trusted Python, a core Wasm module, sandboxed Python."""
    return [
        Kind("trusted", sources.ACKNOWLEDGE, True),
        Kind("core Wasm", sources.acknowledging_module(), False),
        Kind("sandboxed", sources.ACKNOWLEDGE, False),
    ]


async def start(rig: Rig, kind: Kind, count: int) -> tuple[float, list[Run]]:
    """Start programs. Returns the seconds until all have sent their first message, and their runs."""
    began = time.perf_counter()
    runs = [rig.launch(kind.code, None, trusted=kind.trusted) for _ in range(count)]
    said = await asyncio.gather(*(anext(run.messages()) for run in runs))
    seconds = time.perf_counter() - began
    if any(b"started" not in bytes(message) for message in said):
        raise RuntimeError(f"{kind.name}: a program said something else: {said[0]!r}")
    return seconds, runs


async def end(runs: list[Run]) -> None:
    """Ask all programs to end, and wait for their end."""
    for run in runs:
        run.send(b"null")
    for run in runs:
        await run.answer()


class Held(NamedTuple):
    """Resources that this process holds for programs."""

    own_mib: float
    """Memory of this process alone."""
    sequences: int
    operations: int
    tasks: int
    programs: int
    pages: int


def held(rig: Rig) -> Held:
    gc.collect()
    return Held(
        own_mib=psutil.Process().memory_full_info().uss / MIB,
        sequences=rig.runtime.num_sequences,
        operations=rig.runtime.num_operations,
        tasks=len(asyncio.all_tasks()),
        programs=rig.accounts.num_programs,
        pages=rig.accounts.num_pages,
    )


async def bursts(kind: Kind, sizes: Sizes, runs: int) -> tuple[list[float], list[float]]:
    """Seconds of bursts, without the first one of a process, and of single launches beside a paused burst."""
    seconds: list[float] = []
    singles: list[float] = []
    async with timed_rig(0.0) as rig:
        calm_collector()
        for run in range(runs + 1):
            took, paused = await start(rig, kind, sizes.burst)
            if run:
                seconds.append(took)
            if run == runs:
                for _ in range(sizes.singles):
                    single, one = await start(rig, kind, 1)
                    singles.append(single)
                    await end(one)
            await end(paused)
    return seconds, singles


async def memory(kind: Kind, sizes: Sizes) -> tuple[Held, Held, Held]:
    """Resources held before, during and after a pause of so many programs."""
    async with timed_rig(0.0) as rig:
        _, warm = await start(rig, kind, 8)
        await end(warm)
        await asyncio.sleep(0)
        before = held(rig)
        _, runs = await start(rig, kind, sizes.paused)
        during = held(rig)
        await end(runs)
        del runs
        await asyncio.sleep(0.2)
        return before, during, held(rig)


async def _memory_elsewhere(kind: Kind, sizes: Sizes) -> list[Held]:
    """`memory` in a new process, which has no freed memory to use again."""
    command = (sys.executable, "-m", "bench.programs.launch", kind.name, str(sizes.paused))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")
    return [Held(*values) for values in json.loads(out)]


async def report_launch(runs: int, sizes: Sizes) -> dict[str, Any]:
    """Measure launches and memory and print them."""
    print(f"launches: bursts of {sizes.burst}, and one beside {sizes.burst} that are paused; median of {runs}")
    found: dict[str, Any] = {}
    for kind in kinds():
        seconds, singles = await bursts(kind, sizes, runs)
        burst = Spread.of([s * 1000 for s in seconds])
        rate = sizes.burst / statistics.median(seconds)
        one = sorted(s * 1000 for s in singles)
        p50, p95 = statistics.median(one), one[int(len(one) * 0.95)]
        print(f"  {kind.name:10} burst {burst} ms, {rate:7.0f} per second; one p50 {p50:6.2f} ms, p95 {p95:.2f}")
        found[kind.name] = {"burst_s": seconds, "per_s": rate, "one_p50_ms": p50, "one_p95_ms": p95}
    print(f"memory of {sizes.paused} paused programs, and what is left of them; each kind in a process of its own")
    for kind in kinds():
        before, during, after = await _memory_elsewhere(kind, sizes)
        each = (during.own_mib - before.own_mib) * 1024 / sizes.paused
        left = {name: value - getattr(before, name) for name, value in after._asdict().items()}
        counts = ", ".join(f"{value} {name}" for name, value in left.items() if name != "own_mib")
        print(f"  {kind.name:10} {each:7.1f} KiB each; left: {left['own_mib']:.1f} MiB, {counts}")
        found[f"memory, {kind.name}"] = {"kib_each": each, "left": left}
    return found


def main(name: str, paused: str) -> None:
    """One kind's memory, as JSON."""
    kind = next(kind for kind in kinds() if kind.name == name)
    print(json.dumps(asyncio.run(memory(kind, Sizes(paused=int(paused))))))


if __name__ == "__main__":
    main(*sys.argv[1:])
