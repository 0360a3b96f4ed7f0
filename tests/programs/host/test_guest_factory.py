"""Modules are compiled in turns by tenant, at the tenant's cost, and for no longer than a run wants one."""

from __future__ import annotations

import asyncio

import pytest
import wasmtime

from tests.programs.host.help import TENANT, Bench, with_host
from weft.programs.quota.budget import RunBudget
from weft.programs.registry import Quota, checked_code
from weft.programs.run.runs import Run, RunSpec
from weft.programs.sandbox.compiled import CompiledCode, CompiledModule
from weft.programs.sandbox.workers import WorkerProcess
from weft.programs.types import Caller

SLOW, QUICK = 3, 4
"""Pages of memory, by which the two modules are told apart."""


def module(pages: int) -> RunSpec:
    code = wasmtime.wat2wasm(f'(module (memory (export "memory") {pages}) (func (export "run")))')
    return RunSpec(code=checked_code(bytes(code), "wasm", Quota(), "module"), args=b"null")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """Workers that compile the slow module, which never ends."""
    found, compile_it = [], CompiledCode.module
    slow_code = module(SLOW).code.content

    def compiled(self: CompiledCode, code: bytes, worker: WorkerProcess | None = None) -> CompiledModule:
        if code == slow_code and worker is not None:
            found.append(worker)
            worker.run("http.server", ["0", "--bind", "127.0.0.1"], b"")
        return compile_it(self, code, worker)

    monkeypatch.setattr(CompiledCode, "module", compiled)
    return found


async def until_compiling(workers: list[WorkerProcess]) -> None:
    while not any(worker._pid for worker in workers):  # noqa: ASYNC110 (a thread starts it)
        await asyncio.sleep(0.01)


def test_a_run_that_is_cancelled_kills_its_compiler(slow: list[WorkerProcess]) -> None:
    async def test(bench: Bench) -> None:
        run = bench.host.launch(module(SLOW), TENANT)
        await until_compiling(slow)
        run.cancel()
        assert (await run.wait()).status == "cancelled"
        assert bench.parts.guests._compilers.num_running == 0
        assert slow[0]._pid is None

    with_host(test)


def test_another_tenant_does_not_wait_for_a_compiler(slow: list[WorkerProcess]) -> None:
    async def test(bench: Bench) -> None:
        runs: list[Run] = [bench.host.launch(module(SLOW), TENANT) for _ in range(8)]
        await until_compiling(slow)
        other = bench.host.launch(module(QUICK), Caller(tenant="other", namespace="other"))
        assert (await other.wait()).status == "finished"
        # Its own runs wait for the one compiler that the tenant has.
        assert [run.status for run in runs] == ["running"] * 8
        assert len(slow) == 1
        for run in runs:
            run.cancel()
            await run.wait()

    with_host(test)


def test_compiling_is_charged_to_the_tenant_and_not_to_the_run(
    slow: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(RunBudget, "spend_tenant_cpu", lambda self, seconds: charged.append(seconds))

    async def test(bench: Bench) -> None:
        run = bench.host.launch(module(SLOW), TENANT)
        await until_compiling(slow)
        run.cancel()
        record = await run.wait()
        assert charged == [slow[0].cpu_s]
        assert record.usage.cpu_s == 0

    with_host(test)
