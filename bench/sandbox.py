"""Cost of the sandbox: launches, calls, memory. There is no model and no engine: the host only echoes.

    python -m bench.sandbox [--backend fibers|threads] [--guests 1000]

Prints one line for each figure, with the machine. Launches begin when a guest is made and end when it first waits.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import psutil

from bench import alone
from weft.abi.errors import WeftError
from weft.abi.frames import EventKind, commands, pack_event
from weft.programs.sandbox.guest import SandboxedGuest
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.sandbox import Sandbox, SandboxConfig

LIMITS = GuestLimits(cpu_s=None, host_calls=None)
ECHO = """
from weft.sdk.channel import current
from weft.abi.operations import Op
import time
async def main(args):
    channel = current()
    start = time.time()
    for _ in range(args):
        await channel.ask(Op.SLEEP, 0.0)
    return (time.time() - start) / args
"""
POST = """
from weft.sdk.channel import current
from weft.abi.operations import Op
import time
async def main(args):
    channel = current()
    start = time.time()
    for _ in range(args):
        for _ in range(100):
            channel.post(Op.SEQ_APPEND, 1, b"abcd")
        await channel.ask(Op.SLEEP, 0.0)
    return (time.time() - start) / args / 101
"""
WAIT = """
from weft.sdk.channel import current
from weft.abi.operations import Op
async def main(args):
    await current().ask(Op.RECEIVE)
"""
C_MODULE = Path(__file__).resolve().parents[1] / "examples" / "wasm" / "c" / "complete.wasm"


class Host:
    """Answers SLEEP at once and nothing else; says when its guest waits."""

    def __init__(self, on_wait: Callable[[], None] | None = None):
        self._events: list[bytes] = []
        self._on_wait = on_wait

    def commands(self, data: bytes) -> None:
        for command in commands(data):
            if command.op == 4:
                self._events.append(pack_event(EventKind.RESULT, command.call))

    def take_events(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events

    async def wait_events(self, timeout_s: float | None) -> bytes:
        if self._on_wait is not None:
            self._on_wait()
        await asyncio.get_running_loop().create_future()
        return b""

    def on_events(self, wake: Callable[[], None]) -> None:
        raise NotImplementedError


async def paused(
    make: Callable[[Host], SandboxedGuest], count: int
) -> tuple[float, list[asyncio.Task[bytes]], list[SandboxedGuest]]:
    """Seconds until `count` guests wait, and the guests."""
    waiting, all_wait = 0, asyncio.Event()

    def arrived() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == count:
            all_wait.set()

    start = time.perf_counter()
    guests = [make(Host(arrived)) for _ in range(count)]
    tasks = [asyncio.create_task(guest.run()) for guest in guests]
    await all_wait.wait()
    return time.perf_counter() - start, tasks, guests


async def end(tasks: list[asyncio.Task[bytes]], guests: list[SandboxedGuest]) -> None:
    for guest in guests:
        guest.kill(WeftError("over"))
    await asyncio.gather(*tasks, return_exceptions=True)


def memory() -> float:
    """MiB that this process has for itself."""
    gc.collect()
    used = psutil.Process().memory_full_info()
    return float(used.uss) / 2**20


async def measure(sandbox: Sandbox, count: int) -> None:
    def python(source: str, args: bytes = b"null") -> Callable[[Host], SandboxedGuest]:
        return lambda host: sandbox.python(source, args, host, LIMITS)

    async def one(make: Callable[[Host], SandboxedGuest]) -> bytes:
        return await make(Host()).run()

    await one(python(ECHO, b"1"))
    for name, source, unit in (("an exchange", ECHO, "2000"), ("an enqueued call, 100 to an exchange", POST, "100")):
        best = min([float(await one(python(source, unit.encode()))) for _ in range(3)])
        print(f"Python, {name}: {best * 1e6:.1f} us")
    start = time.perf_counter()
    for _ in range(200):
        await one(python("def main(): pass"))
    print(f"Python, run to the end one after the other: {200 / (time.perf_counter() - start):.0f} per second")
    before, threads = memory(), psutil.Process().num_threads()
    seconds, tasks, guests = await paused(python(WAIT), count)
    each = (memory() - before) / count
    print(f"Python, {count} launched and paused: {count / seconds:.0f} per second, {each:.2f} MiB each, ", end="")
    print(f"{psutil.Process().num_threads() - threads} more threads")
    latencies = []
    for _ in range(20):
        single, more_tasks, more = await paused(python(WAIT), 1)
        latencies.append(single)
        await end(more_tasks, more)
    print(f"Python, one more beside them, p50: {sorted(latencies)[10] * 1e3:.1f} ms")
    await end(tasks, guests)
    module = sandbox.compile(C_MODULE.read_bytes())
    before = memory()
    for burst in ("first", "second"):
        seconds, tasks, guests = await paused(lambda host: sandbox.module(module, b'"x"', host, LIMITS), 896)
        each = (memory() - before) * 1024 / 896
        print(f"Wasm in C, 896 launched and paused, {burst} time: {seconds * 1e3:.0f} ms, {each:.0f} KiB each")
        await end(tasks, guests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("auto", "fibers", "threads"), default="auto")
    parser.add_argument("--guests", type=int, default=1000)
    options = parser.parse_args()
    sandbox = Sandbox.open(SandboxConfig(slots=max(1024, options.guests + 8), backend=options.backend))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {sandbox.backend}")
    work: Coroutine[object, object, None] = measure(sandbox, options.guests)
    asyncio.run(work)
    sandbox.close()


if __name__ == "__main__":
    alone.require()
    main()
