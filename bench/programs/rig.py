"""A program host in this process with an engine in another process, for measurements of the costs of programs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from weft.config import ProgramsConfig
from weft.engine.attached import AttachedEngine
from weft.engine.client import EngineClient
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.process import host_parts
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.quota.accounts import Accounts
from weft.programs.registry import Code, Quota, checked_code
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunSpec
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.store.values import MemoryValueStore
from weft.tokenizers.load import load_tokenizer


class Rig:
    """Launches programs and measures their costs."""

    def __init__(self, runtime: Runtime, host: ProgramHost, accounts: Accounts):
        self.runtime = runtime
        self.host = host
        self.accounts = accounts
        """What all programs hold."""

    def launch(self, source: str | bytes, args: Any = None, *, trusted: bool = True) -> Run:
        """Start a program from its source, or from a Wasm module."""
        spec = RunSpec(code=_checked(source), args=json.dumps(args).encode(), trusted=trusted)
        return self.host.launch(spec, Caller(tenant="bench", namespace="bench"))

    async def all(self, source: str, args: Any, count: int, *, trusted: bool = True) -> list[Any]:
        """Results of `count` runs of a program that are started together."""
        runs = [self.launch(source, args, trusted=trusted) for _ in range(count)]
        return [json.loads(await run.answer()) for run in runs]


@functools.cache
def _checked(source: str | bytes) -> Code:
    """Check the source once, as an upload does."""
    if isinstance(source, bytes):
        return checked_code(source, "wasm", Quota(), "bench")
    return checked_code(source.encode(), "python", Quota(), "bench")


@contextlib.asynccontextmanager
async def rig_over(engine: EngineClient, name: str) -> AsyncIterator[Rig]:
    """A rig with an engine that is ready."""
    runtime = Runtime(engine, load_tokenizer("weft-tiny"))
    limits = ProgramsConfig(max_runs=2048, max_runs_per_tenant=2048)
    parts = host_parts([ProgramModel(name, runtime)], limits, MemoryValueStore(), GuestFactory())
    host = ProgramHost(parts, HostOptions(allow_trusted=True))
    try:
        yield Rig(runtime, host, parts.accounts)
    finally:
        await host.close()
        await parts.close()


@contextlib.asynccontextmanager
async def timed_rig(step_ms: float, batching: str = "adaptive") -> AsyncIterator[Rig]:
    """A rig with an engine whose steps each take `step_ms` milliseconds."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        address = f"ipc://{folder}/engine"
        command = (sys.executable, "-m", "bench.programs.timed_engine", address, str(step_ms), batching)
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        engine = AttachedEngine()
        try:
            engine.attach(address)
            await engine.wait_ready()
            async with rig_over(engine, "timed") as rig:
                yield rig
        finally:
            await engine.close()
            process.kill()
            await process.wait()
