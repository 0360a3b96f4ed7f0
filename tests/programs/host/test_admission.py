"""Runs wait for the processor time, the commands and the memory of their tenant, and others do not wait for them."""

import asyncio
import json
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from tests.programs.help import settle
from tests.programs.host.help import TENANT, spec
from tests.programs.virtual_time import LoopClock, run_virtually
from weft.abi.errors import InvalidRequest, LimitExceeded, Overloaded, RunCancelled
from weft.config import ProgramsConfig
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.process import host_parts
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.limits import Limits
from weft.programs.quota.loop_share import GoesOn, LoopShare
from weft.programs.registry import Code
from weft.programs.run.command_queue import CommandQueue
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.store.values import MemoryValueStore
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

OTHER = Caller(tenant="u", namespace="u")
TALK = """
    from weft.sdk import run
    async def main(count):
        for number in range(count):
            run.send(number)
            await run.sleep(0)
        run.log("said")
        return count
"""
WAIT = """
    from weft.sdk import run
    async def main():
        await run.receive()
"""
SPIN = """
    def main():
        while True:
            pass
"""
MANY = """
    from weft.sdk import run
    def main(count):
        for number in range(count):
            run.send(number)
        return count
"""


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_a_program_that_says_much_is_carried_out_in_portions(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of nothing: one command in each pass of the loop."""
    passes = 0
    portion = CommandQueue._portion

    def counted(self: CommandQueue, goes_on: GoesOn) -> bool:
        nonlocal passes
        passes += 1
        return portion(self, goes_on)

    monkeypatch.setattr(CommandQueue, "_portion", counted)

    async def body() -> None:
        runtime = Runtime(FakeEngine(), byte_tokenizer())
        parts = host_parts([ProgramModel("fake", runtime)], ProgramsConfig(), MemoryValueStore(), GuestFactory())
        host = ProgramHost(parts, HostOptions(allow_trusted=True))
        host._loop_share = LoopShare(pass_s=1e-9, turn_s=1e-9)
        run = host.launch(spec(MANY, b"200", trusted=trusted), TENANT)
        assert await messages_of(run) == list(range(200))
        assert run.status == "finished"
        assert run.record().usage.cpu_s > 0
        assert passes >= 190
        await host.close()
        await parts.close()

    asyncio.run(body())


def test_a_program_that_computes_gives_the_tenants_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the sandbox, where nothing but the clock ends what a program computes."""
    paused = asyncio.Event()
    waits = CommandQueue.pause

    async def pause(self: CommandQueue) -> None:
        # What it used so far was charged, and it is in debt.
        self._budget.spend("tokens", 61)
        paused.set()
        await waits(self)

    async def body() -> None:
        runtime = Runtime(FakeEngine(), byte_tokenizer())
        config = ProgramsConfig(tenant_tokens_per_minute=0.001)
        parts = host_parts([ProgramModel("fake", runtime)], config, MemoryValueStore(), GuestFactory())
        if (await parts.guests.open()).backend != "fibers":
            pytest.skip("needs fibers")
        host = ProgramHost(parts)
        monkeypatch.setattr(CommandQueue, "pause", pause)
        run = host.launch(spec(SPIN, trusted=False), TENANT)
        async with asyncio.timeout(60):
            await paused.wait()
            await settle()
            used = run.record().usage.cpu_s
            for _ in range(100):
                await asyncio.sleep(0)
            assert run.record().usage.cpu_s == used
            assert run.status == "running"
            run.cancel("enough")
            assert (await run.wait()).status == "cancelled"
        await host.close()
        await parts.close()

    asyncio.run(body())


def with_host(test: Callable[[ProgramHost, Accounts], Awaitable[None]], **config: object) -> None:
    """A host in virtual time; afterwards nothing may be left anywhere."""

    async def body() -> None:
        engine = FakeEngine()
        runtime = Runtime(engine, byte_tokenizer())
        options = HostOptions(allow_trusted=True, max_waiting=3)
        parts = host_parts(
            [ProgramModel("fake", runtime)], ProgramsConfig(**config), MemoryValueStore(), GuestFactory(), LoopClock()
        )
        host = ProgramHost(parts, options)
        await test(host, parts.accounts)
        await host.close()
        await settle()
        assert not host._active
        assert host._num_waiting == 0
        assert parts.accounts.num_programs == parts.accounts.num_pages == parts.accounts._server.sandbox_bytes == 0
        assert runtime.num_sequences == runtime.num_operations == 0
        await parts.close()

    run_virtually(body())


async def messages_of(run: Run) -> list[object]:
    return [json.loads(message) async for message in run.messages()]


def test_programs_of_one_tenant_wait_and_those_of_another_do_not() -> None:
    async def test(host: ProgramHost, accounts: Accounts) -> None:
        loop = asyncio.get_running_loop()
        neighbour = accounts.open("t", Limits(), sandboxed=False)
        first = host.launch(spec(TALK, b"100"), TENANT)
        other = host.launch(spec(TALK, b"30"), OTHER)
        assert json.loads(await other.answer()) == 30
        assert loop.time() == 0
        # Two calls a message: 120 at once, the rest at two per second.
        assert await messages_of(first) == list(range(100))
        assert loop.time() == pytest.approx(40, abs=1)
        neighbour.spend("host_calls", 60)
        second = host.launch(spec(TALK, b"1"), TENANT)
        assert second.status == "queued"  # what would begin waits too
        await second.wait()
        assert loop.time() == pytest.approx(70, abs=2)
        assert second.record().usage.throttled_s < 2
        neighbour.close()

    with_host(test, tenant_host_calls_per_minute=120)


def test_a_run_that_waits_says_so_and_its_end_comes_after_what_it_said() -> None:
    async def test(host: ProgramHost, accounts: Accounts) -> None:
        run = host.launch(spec(TALK, b"60"), TENANT)
        assert await messages_of(run) == list(range(60))
        assert run.status == "finished"
        assert run.record().usage.throttled_s > 0
        [warning, last] = run.logs()
        assert (warning.level, last.text) == ("warning", "said")
        assert "programs.tenant_host_calls_per_minute" in warning.text

    with_host(test, tenant_host_calls_per_minute=60)


def test_the_time_of_a_run_bounds_its_wait() -> None:
    async def test(host: ProgramHost, accounts: Accounts) -> None:
        run = host.launch(spec(TALK, b"1000", limits=Limits(wall_s=50)), TENANT)
        with pytest.raises(LimitExceeded) as raised:
            await run.answer()
        assert raised.value.param == "wall_s"
        assert asyncio.get_running_loop().time() == pytest.approx(50, abs=1)

    with_host(test, tenant_host_calls_per_minute=60)


@pytest.mark.parametrize("end", ["return 1", "raise ValueError('x')"])
def test_a_run_that_is_over_but_for_what_it_said_can_be_cancelled(end: str) -> None:
    source = f"""
    import asyncio
    from weft.sdk import run
    async def main():
        run.send(1)
        for _ in range(3):
            await asyncio.sleep(0)
        run.send(2)
        {end}
    """

    async def test(host: ProgramHost, accounts: Accounts) -> None:
        run = host.launch(spec(source), TENANT)
        await settle()
        assert [run.status, run.record().usage.host_calls] == ["running", 1]
        run.cancel("enough")
        with pytest.raises(RunCancelled):
            await run.answer()

    with_host(test, tenant_host_calls_per_minute=0.001)


def test_a_full_queue_says_what_it_waits_for_and_when_to_come_back() -> None:
    async def test(host: ProgramHost, accounts: Accounts) -> None:
        neighbour = accounts.open("t", Limits(), sandboxed=False)
        neighbour.spend("tokens", 60 + 30)
        waiting = [host.launch(spec(TALK, b"0"), TENANT) for _ in range(3)]
        with pytest.raises(Overloaded, match="tenant_tokens_per_minute") as raised:
            host.launch(spec(TALK, b"0"), TENANT)
        assert raised.value.retry_after_s == 30
        with pytest.raises(Overloaded, match="as many as may; try again shortly"):
            host.launch(spec(TALK, b"0"), OTHER)
        await asyncio.gather(*(run.wait() for run in waiting))
        assert asyncio.get_running_loop().time() == 30
        neighbour.close()

    with_host(test, tenant_tokens_per_minute=60)


def test_sandboxes_wait_for_memory_in_order_of_arrival() -> None:
    source = "async def main():\n    import asyncio\n    await asyncio.sleep(3600)\n"

    async def test(host: ProgramHost, accounts: Accounts) -> None:
        def launch(size: int, caller: Caller = TENANT) -> Run:
            return host.launch(spec(source, trusted=False, limits=Limits(memory_bytes=size)), caller)

        with pytest.raises(InvalidRequest, match="101"):
            launch(101)
        first, second = launch(60), launch(40, OTHER)
        large, small, third = launch(100), launch(1, OTHER), launch(0)
        assert [run.status for run in (first, second)] == ["running", "running"]
        assert [run.status for run in (large, small, third)] == ["queued"] * 3
        with pytest.raises(Overloaded, match=r"this server.*max_sandbox_bytes\)"):
            launch(1)
        first.cancel()
        await first.wait()
        await settle()
        # There would be a place for the small ones, but not for the one that came before them.
        assert {run.status for run in (large, small, third)} == {"queued"}
        second.cancel()
        await second.wait()
        await settle()
        assert (large.status, small.status) == ("running", "queued")
        large.cancel()
        await large.wait()
        await settle()
        assert (small.status, third.status) == ("running", "running")

    with_host(test, max_sandbox_bytes=100)


def test_a_trusted_child_reserves_no_memory_and_a_sandboxed_one_does() -> None:
    trusted = msgspec.structs.replace(spec(WAIT).code, trusted=True)
    source = f"""
        from weft.sdk import messaging
        async def main(named):
            child = messaging.launch("named") if named else messaging.launch(source={textwrap.dedent(WAIT)!r})
            await child.join()
    """

    async def resolve(tenant: str, reference: str) -> Code:
        return trusted

    async def body() -> None:
        runtime = Runtime(FakeEngine(), byte_tokenizer())
        parts = host_parts([ProgramModel("fake", runtime)], ProgramsConfig(), MemoryValueStore(), GuestFactory())
        host = ProgramHost(replace(parts, resolve=resolve), HostOptions(allow_trusted=True))
        for named, size in ((b"true", 0), (b"false", Limits().memory_bytes)):
            run = host.launch(spec(source, named), TENANT)
            async with asyncio.timeout(60):
                while len(host._active) < 2:  # noqa: ASYNC110  what it waits for has no event
                    await asyncio.sleep(0)
                assert (parts.accounts.num_programs, parts.accounts._server.sandbox_bytes) == (2, size)
                run.cancel()
                await run.wait()
                while host._active:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert (parts.accounts.num_programs, parts.accounts._server.sandbox_bytes) == (0, 0)
        await host.close()
        await parts.close()

    asyncio.run(body())
