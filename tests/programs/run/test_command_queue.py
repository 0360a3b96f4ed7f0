"""Commands of programs wait for the time that their tenant owes, in order, and are bounded; tenants take turns."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.programs.virtual_time import LoopClock, run_virtually
from weft.abi.errors import LimitExceeded, Overloaded, RunCancelled, WeftError
from weft.abi.frames import CommandFrame, WireError, pack
from weft.abi.operations import Op
from weft.config import ProgramsConfig
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.limits import Limits
from weft.programs.quota.loop_share import GoesOn, LoopShare
from weft.programs.run import command_queue as module
from weft.programs.run.command_queue import CommandQueue


def say(*numbers: int) -> bytes:
    """Commands, told apart by a number."""
    return b"".join(pack(Op.CANCEL, 0, number) for number in numbers)


class FakeHost:
    """Remembers what it was told, and raises what a test says. Each command takes a millisecond of a made-up clock."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.error: Exception | None = None
        self.now_s = 0.0

    def carry_out(self, commands: Iterator[CommandFrame], goes_on: GoesOn) -> bool:
        if self.error is not None:
            raise self.error
        for command in commands:
            self.heard.append(int(command.numbers[0]))
            self.now_s += 0.001
            if not goes_on():
                return False
        return True

    def take_events(self) -> bytes:
        return b""

    async def wait_events(self, timeout_s: float | None) -> bytes:
        return b""

    def on_events(self, wake: Callable[[], None]) -> None:
        pass


def with_queue(test: Callable[[CommandQueue, FakeHost, Accounts, list[WeftError]], Awaitable[None]]) -> None:
    async def body() -> None:
        accounts = Accounts(ProgramsConfig(tenant_tokens_per_minute=60), LoopClock())
        host, ended = FakeHost(), []
        share = LoopShare(clock=lambda: host.now_s)
        queue = CommandQueue(host, accounts.open("t", Limits()), share, tenant="t", end=ended.append)
        await test(queue, host, accounts, ended)

    run_virtually(body())


def test_commands_wait_in_order_until_nothing_is_owed() -> None:
    async def test(queue: CommandQueue, host: FakeHost, accounts: Accounts, ended: list[WeftError]) -> None:
        other = accounts.open("t", Limits())
        queue.commands(say(1))
        assert host.heard == [1]
        other.spend("tokens", 60 + 5)
        queue.commands(say(2))
        queue.commands(say(3))
        await asyncio.sleep(4)
        assert host.heard == [1]
        other.spend("tokens", 2)  # it is paid for first
        await asyncio.sleep(2.5)
        assert host.heard == [1]
        assert queue.waited_s == 6.5
        await queue.settled()
        assert asyncio.get_running_loop().time() == pytest.approx(7)
        assert host.heard == [1, 2, 3]
        assert queue.waited_s == pytest.approx(7)
        queue.commands(say(4))
        assert host.heard[-1] == 4
        assert not ended

    with_queue(test)


@pytest.mark.parametrize("error", [LimitExceeded("used up", "tokens"), WireError("garbage")])
def test_what_breaks_a_run_later_ends_it(error: Exception) -> None:
    async def test(queue: CommandQueue, host: FakeHost, accounts: Accounts, ended: list[WeftError]) -> None:
        accounts.open("t", Limits()).spend("tokens", 61)
        queue.commands(say(1))
        queue.commands(say(2))
        host.error = error
        with pytest.raises(WeftError) as raised:
            await queue.settled()
        assert ended == [raised.value]
        assert str(error) in str(raised.value)
        host.error = None
        await asyncio.sleep(100)
        assert host.heard == []

    with_queue(test)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 4 * len(say(1)))

    async def test(queue: CommandQueue, host: FakeHost, accounts: Accounts, ended: list[WeftError]) -> None:
        accounts.open("t", Limits()).spend("tokens", 61)
        queue.commands(say(1, 2))
        queue.commands(say(1, 2))
        with pytest.raises(Overloaded, match="52 bytes"):
            queue.commands(say(1))

    with_queue(test)


def test_the_commands_of_an_exchange_are_bounded() -> None:
    async def body() -> None:
        host, ended = FakeHost(), []
        share = LoopShare(clock=lambda: host.now_s)
        budget = Accounts(ProgramsConfig(), LoopClock()).open("t", Limits(exchange_commands=3))
        queue = CommandQueue(host, budget, share, tenant="t", end=ended.append)
        for _ in range(3):
            queue.commands(say(1, 2, 3))
        assert host.heard == [1, 2, 3] * 3
        with pytest.raises(LimitExceeded, match="more than 3 commands in one exchange") as raised:
            queue.commands(say(4, 5, 6, 7))
        assert raised.value.param == "exchange_commands"
        assert host.heard[9:] == [4, 5, 6]
        assert not ended

        # The same where the commands' turn comes later.
        host.heard.clear()
        share.run(lambda goes_on: bool(setattr(host, "now_s", host.now_s + 1.0)))
        queue = CommandQueue(host, budget, share, tenant="t", end=ended.append)
        queue.commands(say(4, 5, 6, 7))
        with pytest.raises(LimitExceeded):
            await queue.settled()
        assert host.heard == [4, 5, 6]
        assert [type(error) for error in ended] == [LimitExceeded]

    run_virtually(body())


def test_a_run_that_is_killed_carries_nothing_out() -> None:
    async def test(queue: CommandQueue, host: FakeHost, accounts: Accounts, ended: list[WeftError]) -> None:
        accounts.open("t", Limits()).spend("tokens", 61)
        queue.commands(say(1))
        settled = asyncio.ensure_future(queue.settled())
        await asyncio.sleep(0)
        queue.kill(RunCancelled("enough"))
        with pytest.raises(RunCancelled):
            await settled
        await asyncio.sleep(100)
        assert host.heard == []

    with_queue(test)


def test_one_that_computes_waits_too() -> None:
    async def test(queue: CommandQueue, host: FakeHost, accounts: Accounts, ended: list[WeftError]) -> None:
        await queue.pause()
        assert asyncio.get_running_loop().time() == 0
        accounts.open("t", Limits()).spend("tokens", 60 + 30)
        await queue.pause()
        assert asyncio.get_running_loop().time() == queue.waited_s == 30

    with_queue(test)


class Crowd:
    """Programs on one loop whose commands take a millisecond each of a made-up clock; counts what runs in each pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.share = LoopShare(pass_s=0.02, turn_s=0.005, clock=lambda: self.now_s)
        self.accounts = Accounts()
        self.said: list[tuple[str, int]] = []
        self.in_pass = 0
        self.most_in_a_pass = 0
        self.passes = 0

    def program(self, name: str, tenant: str) -> CommandQueue:
        crowd = self

        class Told(FakeHost):
            def carry_out(self, commands: Iterator[CommandFrame], goes_on: GoesOn) -> bool:
                for command in commands:
                    crowd.said.append((name, int(command.numbers[0])))
                    crowd.now_s += 0.001
                    crowd.in_pass += 1
                    if not goes_on():
                        return False
                return True

        return CommandQueue(Told(), self.accounts.open(tenant, Limits()), self.share, tenant=tenant, end=self.fail)

    def fail(self, error: WeftError) -> None:
        raise AssertionError(error)

    async def watch(self, *queues: CommandQueue) -> None:
        """Until nothing of them waits, pass by pass of the loop."""
        while any(queue.behind() is not None for queue in queues):
            self.most_in_a_pass = max(self.most_in_a_pass, self.in_pass)
            self.in_pass = 0
            self.passes += 1
            await asyncio.sleep(0)


def test_a_message_of_many_commands_gives_way_to_the_loop() -> None:
    async def body() -> None:
        crowd = Crowd()
        queue = crowd.program("p", "t")
        queue.commands(say(*range(1000)))
        queue.commands(say(1000))
        assert len(crowd.said) == 5
        await crowd.watch(queue)
        assert [number for _, number in crowd.said] == list(range(1001))
        assert crowd.most_in_a_pass <= 25
        assert crowd.passes >= 1000 / 25
        # Nothing waits: what it says now is carried out now.
        await asyncio.sleep(0)
        queue.commands(say(7))
        assert crowd.said[-1] == ("p", 7)

    asyncio.run(body())


def test_all_programs_together_have_one_share_of_a_pass_and_tenants_take_turns() -> None:
    async def body() -> None:
        crowd = Crowd()
        hostile = [crowd.program(f"h{number}", "h") for number in range(50)]
        for queue in hostile:
            queue.commands(say(*range(100)))
        # What 50 programs say at once is no more than what one may.
        assert len(crowd.said) <= 20
        other = crowd.program("o", "o")
        other.commands(say(*range(20)))
        assert ("o", 0) not in crowd.said
        crowd.in_pass = 0
        await crowd.watch(other)
        # Two tenants: of what ran meanwhile about half was the other's, however many programs the first has.
        assert crowd.passes <= 4
        crowd.in_pass = 0
        await crowd.watch(*hostile)
        assert crowd.most_in_a_pass <= 25
        assert sum(name.startswith("h") for name, _ in crowd.said) == 5000
        for number in range(50):
            assert [n for name, n in crowd.said if name == f"h{number}"] == list(range(100))

    asyncio.run(body())


def test_a_program_that_is_ended_by_a_command_says_nothing_more() -> None:
    async def body() -> None:
        crowd = Crowd()
        queue = crowd.program("p", "t")
        queue.commands(say(*range(100)))
        waiting = asyncio.ensure_future(queue.settled())
        await asyncio.sleep(0)
        count = len(crowd.said)
        queue.kill(RunCancelled("enough"))
        with pytest.raises(RunCancelled):
            await waiting
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(crowd.said) == count

    asyncio.run(body())


def test_what_a_program_that_never_awaits_says_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guest in the sandbox comes here; a trusted one that cannot be stopped has it carried out at once."""
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 30 * len(say(1)))

    async def body() -> None:
        crowd = Crowd()
        queue = crowd.program("p", "t")
        for first in range(0, 200, 10):
            queue.commands(say(*range(first, first + 10)))
            assert first + 10 - len(crowd.said) <= 30
        await crowd.watch(queue)
        assert [number for _, number in crowd.said] == list(range(200))

    asyncio.run(body())
