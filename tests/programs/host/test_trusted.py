"""Trusted programs: the same source as in the sandbox, as tasks of the host's loop."""

import asyncio
import sys

import pytest

from tests.programs.help import settle
from tests.programs.sessions import Host, obj, run
from weft.abi.errors import LimitExceeded, ProgramFailed, WeftError
from weft.core.wire import Open
from weft.programs.host.trusted import TrustedGuest
from weft.programs.quota.limits import Limits


class Stopped(WeftError):
    kind = "stopped"


def guest(host: Host, source: str, args: object = None, **limits: object) -> TrustedGuest:
    program = host.program(Limits(**limits))
    return TrustedGuest(program.session, source=source, args=obj(args), name="p.py")


def test_a_program_gets_its_arguments_and_gives_its_result() -> None:
    async def test(host: Host) -> None:
        assert await guest(host, "async def main(args):\n return {'n': args['n'] + 1}", {"n": 1}).run() == b'{"n":2}'
        assert await guest(host, "def main():\n return 'ünï'").run() == '"ünï"'.encode()

    run(test)


def test_a_main_is_a_program_too() -> None:
    async def main(args: int) -> int:
        return args * 2

    async def test(host: Host) -> None:
        assert await TrustedGuest(host.program().session, main=main, args=b"4").run() == b"8"

    run(test)


def test_a_program_talks_through_the_library() -> None:
    async def test(host: Host) -> None:
        source = """
from weft.sdk import run, store

async def main(args):
    run.log("began")
    await store.put("k", b"v")
    run.send({"got": (await store.get("k")).decode()})
    return await run.receive()
"""
        program = host.program()
        running = asyncio.create_task(TrustedGuest(program.session, source=source).run())
        await settle()
        program.session.deliver(b'"bye"')
        assert await running == b'"bye"'
        assert program.outlet.messages == [b'{"got":"v"}']
        assert program.outlet.logs == [(1, "began")]

    run(test)


def test_what_is_said_last_is_heard() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        source = "from weft.sdk import run\ndef main():\n run.send(1)\n run.send(2)"
        assert await TrustedGuest(program.session, source=source).run() == b"null"
        assert program.outlet.messages == [b"1", b"2"]
        assert program.session.usage().host_calls == 2

    run(test)


def test_two_programs_do_not_hear_each_other() -> None:
    async def test(host: Host) -> None:
        source = """
import asyncio
from weft.sdk import run, messaging

async def part(n):
    await run.sleep(0)
    run.send(n)

async def main(args):
    await asyncio.gather(part(args), part(args + 1))
"""
        programs = [host.program() for _ in range(3)]
        await asyncio.gather(
            *[TrustedGuest(p.session, source=source, args=obj(10 * i)).run() for i, p in enumerate(programs)]
        )
        assert [sorted(p.outlet.messages) for p in programs] == [[b"0", b"1"], [b"10", b"11"], [b"20", b"21"]]

    run(test)


def test_commands_of_one_turn_are_one_message_to_the_host() -> None:
    async def test(host: Host) -> None:
        source = "from weft.sdk import run\nasync def main():\n for n in range(50): run.send(n)"
        made = guest(host, source)
        await made.run()
        assert made.usage().host_calls == 1

    run(test)


def test_failures_are_the_program_s_own() -> None:
    async def test(host: Host) -> None:
        with pytest.raises(ProgramFailed, match="ValueError: no") as failed:
            await guest(host, "def helper():\n raise ValueError('no')\nasync def main():\n helper()").run()
        assert 'File "p.py", line 2, in helper' in failed.value.traceback
        assert "weft/" not in failed.value.traceback
        for source, message in (
            ("x = ", "line 1"),
            ("x = 1", "main"),
            ("def main(): return {1, 2}", "JSON"),
            ("import sys\ndef main(): sys.exit(3)", "sys.exit"),
            ("import asyncio\nasync def main(): raise asyncio.CancelledError", "cancelled itself"),
        ):
            with pytest.raises(ProgramFailed, match=message):
                await guest(host, source).run()

    run(test)


def test_errors_of_calls_can_be_caught() -> None:
    async def test(host: Host) -> None:
        source = """
from weft.sdk import messaging
from weft.sdk.errors import LimitExceeded

async def main():
    try:
        await messaging.launch("p").started()
    except LimitExceeded as error:
        return error.param
"""
        assert await guest(host, source, children=0).run() == b'"children"'

    run(test)


def test_a_limit_that_is_used_up_ends_the_program_whatever_it_catches() -> None:
    async def test(host: Host) -> None:
        source = """
from weft.sdk import run

async def main():
    caught = 0
    while caught < 5:
        try:
            run.log("x")
            await run.sleep(0)
        except BaseException:
            caught += 1
    return "survived"
"""
        with pytest.raises(LimitExceeded, match="host_calls"):
            await guest(host, source, host_calls=20).run()

    run(test)


def test_a_killed_program_ends_at_every_await() -> None:
    async def test(host: Host) -> None:
        source = """
import asyncio
from weft.sdk import run, store, messaging

async def main():
    run.log("a")
    await store.put("k", b"v")
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(1e5))
        await run.sleep(0)
        messaging.subscribe("t")
        await run.receive()
"""
        for turns in range(12):
            program = host.program()
            made = TrustedGuest(program.session, source=source)
            running = asyncio.create_task(made.run())
            await settle(turns)
            made.kill(Stopped("enough"))
            made.kill(Stopped("again"))
            with pytest.raises(Stopped, match="enough"):
                await running
            program.close()
            await settle()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test)


def test_it_may_be_killed_before_it_begins_and_after_it_ended() -> None:
    async def test(host: Host) -> None:
        early = guest(host, "def main(): return 1")
        early.kill(Stopped("early"))
        with pytest.raises(Stopped):
            await early.run()
        late = guest(host, "def main(): return 1")
        assert await late.run() == b"1"
        late.kill(Stopped("late"))
        with pytest.raises(RuntimeError, match="once"):
            await late.run()

    run(test)


def test_whoever_waits_for_it_may_be_cancelled() -> None:
    async def test(host: Host) -> None:
        running = asyncio.create_task(guest(host, "import asyncio\nasync def main(): await asyncio.sleep(1e5)").run())
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test)


def test_tasks_that_it_leaves_behind_reach_nobody() -> None:
    async def test(host: Host) -> None:
        source = """
import asyncio
import sys
from weft.sdk import run
left = []
ends = []

async def talk():
    for _ in range(3):
        await asyncio.sleep(0)
    try:
        run.send("still here")
    except Exception as error:
        ends.append(error.kind)

async def main():
    left.append(asyncio.create_task(talk()))
    left.append(asyncio.create_task(waiting()))
    await asyncio.sleep(0)
    sys.modules["weft_test_ends"] = ends

async def waiting():
    try:
        await run.receive()
    except Exception as error:
        ends.append(error.kind)
"""
        program = host.program()
        assert await TrustedGuest(program.session, source=source).run() == b"null"
        await settle()
        assert program.outlet.messages == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert sys.modules.pop("weft_test_ends") == ["cancelled", "cancelled"]

    run(test)


def test_sequences_of_a_program_that_forgets_them_are_given_back() -> None:
    async def test(host: Host) -> None:
        source = """
from weft.sdk.channel import current
from weft.abi.operations import Op

async def main():
    current().post(Op.SEQ_OPEN, 1, 0)
    current().post(Op.SEQ_APPEND, 1, bytes(64))
"""
        program = host.program()
        await TrustedGuest(program.session, source=source).run()
        await settle()
        assert any(isinstance(command, Open) for command in host.engine.sent)
        assert len(host.engine.sequences) == 1
        program.close()
        await settle()
        assert host.engine.sequences == {}
        assert "__program__" in sys.modules

    run(test)
