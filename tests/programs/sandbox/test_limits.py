"""Limits of guests, and how they are ended: by themselves, by their host, by a limit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import pytest

from tests.programs.sandbox.help import CALL, SHORT, FakeHost, execute, failure, opened_with, python
from weft.abi.errors import LimitExceeded, Overloaded, WeftError
from weft.abi.frames import CommandFrame, WireError
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.sandbox import Sandbox

SPIN = "def main():\n    print('on')\n    while True: pass\n"
WAIT = CALL + "async def main(): await ask(Op.RECEIVE)\n"


class Stopped(WeftError):
    kind = "stopped"


def test_a_guest_that_computes_is_killed_and_others_run_meanwhile(sandbox: Sandbox) -> None:
    async def run() -> bytes:
        host = FakeHost()
        guest = sandbox.python(SPIN, b"null", host)
        running = asyncio.ensure_future(guest.run())
        said = asyncio.Event()
        host.on_command = lambda command: said.set()
        await said.wait()
        other = await sandbox.python("def main(): return 1", b"null", FakeHost(), SHORT).run()
        guest.kill(Stopped("enough"))
        with pytest.raises(Stopped, match="enough"):
            await running
        assert guest.usage().cpu_s > 0
        return other

    assert execute(run()) == b"1"


def test_a_guest_that_waits_is_killed(sandbox: Sandbox) -> None:
    async def run() -> None:
        host = FakeHost()
        waiting = asyncio.Event()
        host.on_wait = waiting.set
        guest = sandbox.python(WAIT, b"null", host)
        running = asyncio.ensure_future(guest.run())
        await waiting.wait()
        guest.kill(Stopped("enough"))
        guest.kill(Stopped("later ones do not count"))
        with pytest.raises(Stopped, match="enough"):
            await running
        guest.kill(Stopped("it has ended"))

    execute(run())


def test_a_guest_is_killed_from_within_its_own_command(sandbox: Sandbox) -> None:
    async def run() -> None:
        host = FakeHost()
        guest = sandbox.python(WAIT, b"null", host)
        host.on_command = lambda command: guest.kill(Stopped("at once"))
        with pytest.raises(Stopped, match="at once"):
            await guest.run()
        # Nothing of the end is left over for whoever awaited it.
        await asyncio.sleep(0)

    execute(run())


def test_a_guest_that_was_killed_before_does_not_begin(sandbox: Sandbox) -> None:
    async def run() -> None:
        host = FakeHost()
        guest = sandbox.python("print('x')\ndef main(): pass", b"null", host)
        guest.kill(Stopped("no"))
        with pytest.raises(Stopped):
            await guest.run()
        assert host.said == []

    execute(run())


def test_a_task_that_is_cancelled_ends_its_guest(sandbox: Sandbox) -> None:
    async def run() -> None:
        host = FakeHost()
        waiting = asyncio.Event()
        host.on_wait = waiting.set
        running = asyncio.ensure_future(sandbox.python(WAIT, b"null", host).run())
        await waiting.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    execute(run())


def test_the_limit_on_processor_time(sandbox: Sandbox) -> None:
    with pytest.raises(LimitExceeded, match=r"0\.1 s") as caught:
        python(sandbox, SPIN, limits=GuestLimits(cpu_s=0.1))
    assert caught.value.param == "cpu_s"


def test_waiting_costs_no_processor_time(sandbox: Sandbox) -> None:
    async def run() -> float:
        source = "import asyncio\nasync def main(): await asyncio.sleep(0.3)"
        guest = sandbox.python(source, b"null", FakeHost(), GuestLimits(cpu_s=0.2))
        await guest.run()
        return guest.usage().cpu_s

    assert 0 < execute(run()) < 0.2


@pytest.mark.parametrize(
    "statement",
    [
        "x = []\n    while True: x.append(bytearray(1 << 20))",
        "x = 'a' * (1 << 30)",
        "import zlib\n    d = zlib.compressobj(9)\n    b = d.compress(bytes(32 << 20))\n"
        "    b += d.flush()\n    x = [zlib.decompress(b) for _ in range(9)]",
    ],
)
def test_the_limit_on_memory(sandbox: Sandbox, statement: str) -> None:
    with pytest.raises(LimitExceeded) as caught:
        python(sandbox, f"def main():\n    {statement}\n")
    assert caught.value.param == "memory_bytes"


def test_running_out_of_memory_can_be_caught(sandbox: Sandbox) -> None:
    source = "def main():\n    try:\n        bytearray(1 << 30)\n    except MemoryError:\n        return 'caught'\n"
    assert python(sandbox, source) == b'"caught"'


FULL = """
from weft.sdk.channel import current
from weft.abi.operations import Op

async def main(args):
    held, size = [], 1 << 20
    while size >= args["smallest"]:
        try:
            while True:
                held.append(bytearray(size))
        except MemoryError:
            size >>= 1
    return len((await current().ask(Op.TOKENIZE, 0, b"\\xff" * args["said"]))[0])
"""


@pytest.mark.parametrize("smallest", [1 << 20, 1 << 14, 1 << 10, 256])
@pytest.mark.parametrize("said", [1000, 20_000, 1_000_000])
def test_whoever_runs_out_of_memory_within_a_call_of_the_host_hears_which_limit_it_was(
    sandbox: Sandbox, smallest: int, said: int
) -> None:
    args = f'{{"smallest": {smallest}, "said": {said}}}'.encode()
    try:
        outcome = python(sandbox, FULL, args).decode()
    except LimitExceeded as error:
        outcome = str(error.param)
    # Where only large pieces were taken there is room for small ones.
    assert outcome == "memory_bytes" or (outcome == f"{4 * said}" and smallest * 4 > said)


@pytest.mark.parametrize("count", [2, 8])
def test_what_cannot_be_sent_for_want_of_memory_names_the_limit(sandbox: Sandbox, count: int) -> None:
    source = f"""
from weft.sdk import gather, tokenize

async def main(args):
    await gather(tokenize("ab " * 3_000_000) for _ in range({count}))
"""
    with pytest.raises(LimitExceeded) as caught:
        python(sandbox, source)
    assert caught.value.param == "memory_bytes"


def test_too_little_memory_to_start(sandbox: Sandbox) -> None:
    with pytest.raises(LimitExceeded, match="to start") as caught:
        python(sandbox, "def main(): pass", limits=GuestLimits(memory_bytes=1 << 20))
    assert caught.value.param == "memory_bytes"


@pytest.mark.parametrize(
    "source",
    [
        "def f(): f()\ndef main(): f()\n",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\ndef main(): f()\n",
        "def main():\n    x = []\n    for _ in range(10**5): x = [x]\n    repr(x)\n",
        "def main(): return eval('(' * 200000)\n",
        "def main():\n    x = []\n    x.append(x)\n    return x\n",
    ],
)
def test_recursion_ends_the_program_alone(sandbox: Sandbox, source: str) -> None:
    failure(sandbox, source)
    assert python(sandbox, "def main(): return 1") == b"1"


def test_the_limit_on_host_calls(sandbox: Sandbox) -> None:
    source = CALL + "async def main():\n    while True: await ask(Op.TOKENIZE, 0, b'')\n"
    with pytest.raises(LimitExceeded, match="50 times") as caught:
        python(sandbox, source, limits=GuestLimits(host_calls=50))
    assert caught.value.param == "host_calls"


def test_the_limit_on_results(sandbox: Sandbox) -> None:
    with pytest.raises(LimitExceeded) as caught:
        python(sandbox, "def main(): return 'x' * 100", limits=GuestLimits(result_bytes=99))
    assert caught.value.param == "result_bytes"


FORGE = "import sys\nhost = sys.modules['app'].host\n"


@pytest.mark.parametrize(
    "commands",
    [repr("\x01"), repr("\xff" * 64), repr("\x10\0\0\0\x01" + "\0" * 60), "'\\u0100'", "'\\U0001f600' * 1000"],
)
def test_garbage_in_place_of_commands_ends_the_run(sandbox: Sandbox, commands: str) -> None:
    with pytest.raises(WireError):
        python(sandbox, FORGE + f"def main(): host.exchange({commands}, 0.0)")


def test_a_time_that_is_none_ends_the_run(sandbox: Sandbox) -> None:
    with pytest.raises(WireError, match="not a number"):
        python(sandbox, FORGE + "def main(): host.exchange('', float('nan'))")


def test_what_is_printed_before_a_long_computation_is_heard(sandbox: Sandbox) -> None:
    async def run() -> list[CommandFrame]:
        host = FakeHost()
        with pytest.raises(LimitExceeded):
            await sandbox.python(SPIN, b"null", host, GuestLimits(cpu_s=0.05)).run()
        return host.said

    assert [command.blobs for command in execute(run())] == [[b"on"]]


def test_slots_come_back_after_every_kind_of_end(fibers: Sandbox) -> None:
    """More runs than slots, in every way to end."""
    small = opened_with("fibers", 4)
    sources = ["def main(): return 1", "def main(): 1 / 0", "def main(): repr_me()", FORGE + "host.exchange('x', 0.0)"]

    async def end(source: str) -> None:
        with contextlib.suppress(WeftError, WireError):
            await small.python(source, b"null", FakeHost(), SHORT).run()

    async def killed() -> None:
        host = FakeHost()
        guest = small.python(WAIT, b"null", host)
        host.on_wait = lambda: asyncio.get_running_loop().call_soon(guest.kill, Stopped("enough"))
        with pytest.raises(Stopped):
            await guest.run()

    async def run() -> bytes:
        for _ in range(75):
            await asyncio.gather(*map(end, sources[:3]), killed())
        await end(sources[3])
        return await small.python("def main(): return 1", b"null", FakeHost(), SHORT).run()

    try:
        assert execute(run()) == b"1"
    finally:
        small.close()


@pytest.mark.parametrize("backend", ["fibers", "threads"])
def test_more_than_there_are_slots_is_refused(backend: str) -> None:
    small = opened_with(backend, 2)

    async def run() -> None:
        guests = []
        for _ in range(2):
            host = FakeHost()
            waiting = asyncio.Event()
            host.on_wait = waiting.set
            guest = small.python(WAIT, b"null", host)
            guests.append((guest, asyncio.ensure_future(guest.run())))
            await waiting.wait()
        with pytest.raises(Overloaded):
            await small.python("def main(): pass", b"null", FakeHost()).run()
        for guest, running in guests:
            guest.kill(Stopped("enough"))
            with pytest.raises(Stopped):
                await running
        await small.python("def main(): pass", b"null", FakeHost()).run()

    try:
        execute(run())
    finally:
        small.close()


@pytest.mark.parametrize("backend", ["fibers", "threads"])
def test_no_thread_is_left(backend: str) -> None:
    def count() -> int:
        gc.collect()
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

    def limited() -> None:
        own = opened_with(backend, 8)
        with pytest.raises(LimitExceeded):
            python(own, SPIN, limits=GuestLimits(cpu_s=0.02))
        own.close()

    limited()  # the process's first sandbox compiles the runner, on threads of the compiler that stay
    before, python_threads = count(), threading.active_count()
    limited()
    assert count() == before
    assert threading.active_count() == python_threads


def test_a_guest_that_asks_without_end_lets_others_run(sandbox: Sandbox) -> None:
    async def run() -> None:
        guest = sandbox.python(FORGE + "def main():\n    while True: host.exchange('', 0.0)\n", b"null", FakeHost())
        running = asyncio.ensure_future(guest.run())
        for _ in range(20):
            await asyncio.sleep(0.001)
        guest.kill(Stopped("enough"))
        with pytest.raises(Stopped):
            await running

    execute(run())


def test_large_messages_count_as_more_calls(sandbox: Sandbox) -> None:
    async def run() -> int:
        source = CALL + (
            "async def main():\n"
            "    current().post(Op.STORE_PUT, b'name', bytes(1 << 20))\n"
            "    await ask(Op.TOKENIZE, 0, b'')\n"
        )
        guest = sandbox.python(source, b"null", FakeHost(), SHORT)
        await guest.run()
        return guest.usage().host_calls

    assert 16 <= execute(run()) < 25
