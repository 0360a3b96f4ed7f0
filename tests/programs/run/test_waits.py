"""The engine is told what a program waits for, and a program that waits for the device alone says nothing."""

import math
from collections.abc import Callable

import msgspec
import pytest

from tests.programs.help import settle
from tests.programs.run.sequence_calls import PROMPT, opened
from tests.programs.run.test_runs_leave_nothing import on_engine
from tests.programs.sessions import Host, Program, obj, run
from tests.programs.stepped_engine import SteppedEngine
from tests.python_calls import count_calls
from weft.abi.frames import pack
from weft.abi.operations import Op
from weft.core.waits import WaitKind
from weft.core.wire import Expect, ExpectSpace
from weft.programs.run.calls.sequence import MAX_EXPECTED
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine


def told(host: Host) -> list[tuple[int, str, float | None]]:
    """What the engine has been told since the last call, by number of the sequence in order."""
    found = sorted((e.seq, e.kind, e.expected_in_s) for e in host.engine.sent if isinstance(e, Expect))
    host.engine.sent.clear()
    return found


async def _join(program: Program) -> None:
    await program.result(Op.LAUNCH, 9, obj({"program": "p"}))
    program.ask(Op.JOIN, 9)


WAITS: list[tuple[Callable[[Program], object], WaitKind, float | None]] = [
    (lambda program: program.ask(Op.SLEEP, 12.5), WaitKind.SLEEP, 12.5),
    (lambda program: program.ask(Op.RECEIVE), WaitKind.MESSAGE, None),
    (lambda program: program.ask(Op.HTTP, obj({"url": "http://127.0.0.1:1/"}), b""), WaitKind.HTTP, None),
]


@pytest.mark.parametrize(("wait", "kind", "expected_in_s"), WAITS)
def test_all_idle_sequences_wait_for_what_the_program_waits_for(
    wait: Callable[[Program], object], kind: WaitKind, expected_in_s: float | None
) -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program, 1)
        await program.result(Op.SEQ_DIST, 1, 4, PROMPT)
        program.say(Op.SEQ_FORK, 1, 2)
        program.say(Op.SEQ_OPEN, 3, 0)
        program.say(Op.SEQ_RELEASE, 3)
        wait(program)
        await settle()
        assert [entry[1:] for entry in told(host)] == [(kind, expected_in_s)] * 2

    run(test)


def test_the_result_of_another_run_is_a_message() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        await _join(program)
        await settle()
        assert [entry[1] for entry in told(host)] == [WaitKind.MESSAGE]

    run(test)


def test_a_sequence_that_the_program_waits_for_is_not_told_of() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program, 1)
        opened(program, 2)
        program.ask(Op.SEQ_GENERATE, 1, 0, b"{}")
        program.ask(Op.RECEIVE)
        await settle()
        first, second = host.engine.sequences
        assert told(host) == [(second, WaitKind.MESSAGE, None)]
        assert first != second

    run(test, engine=FakeEngine(auto=False))


def test_a_message_that_is_there_is_not_waited_for() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        program.session.deliver(b"1")
        assert await program.result(Op.RECEIVE) == [b"1"]
        assert told(host) == []

    run(test)


def test_a_sleep_beside_another_wait_is_its_time_limit() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        program.session.commands(pack(Op.RECEIVE, 70) + pack(Op.SLEEP, 71, 30.0))
        await settle()
        assert [entry[1:] for entry in told(host)] == [(WaitKind.MESSAGE, None)]

    run(test)


def test_what_the_engine_knows_is_said_once() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        for _ in range(3):
            program.ask(Op.RECEIVE)
        await settle()
        assert len(told(host)) == 1
        await program.result(Op.SEQ_DIST, 1, 4, PROMPT)
        program.ask(Op.RECEIVE)
        await settle()
        assert len(told(host)) == 1, "an operation has ended the wait"

    run(test)


def test_of_many_sequences_the_newest_are_told_of() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        for number in range(1, MAX_EXPECTED + 20):
            program.say(Op.SEQ_OPEN, number, 0)
        program.ask(Op.SLEEP, 1.0)
        await settle()
        numbers = [seq for seq, _, _ in told(host)]
        assert len(numbers) == MAX_EXPECTED
        assert max(numbers) - min(numbers) == MAX_EXPECTED - 1

    run(test)


def test_a_program_that_looks_at_every_token_pays_nothing() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        for number in range(1, 40):
            opened(program, number)
        for _ in range(5):
            await program.result(Op.SEQ_DIST, 1, 4, PROMPT)
        assert told(host) == []
        few = count_calls(lambda: program.ask(Op.SEQ_DIST, 1, 4, PROMPT))
        for number in range(2, 40):
            program.say(Op.SEQ_RELEASE, number)
        await settle()
        assert few == count_calls(lambda: program.ask(Op.SEQ_DIST, 1, 4, PROMPT))

    run(test)


def test_what_a_program_says_itself_holds_until_its_next_operation() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        program.ask(Op.SEQ_GENERATE, 1, 0, b"{}")
        program.say(Op.SEQ_EXPECT, 1, 2.5, b"tool")
        await settle()
        assert [entry[1:] for entry in told(host)] == [(WaitKind.TOOL, 2.5)], "also while it generates"
        program.say(Op.SEQ_EXPECT, 1, float("nan"), b"tool")
        program.ask(Op.RECEIVE)
        await settle()
        assert [entry[1:] for entry in told(host)] == [(WaitKind.TOOL, None)]
        program.say(Op.SEQ_APPEND, 1, PROMPT)
        program.say(Op.SEQ_TRUNCATE, 1, 2)
        await settle()
        program.ask(Op.RECEIVE)
        await settle()
        assert [entry[1] for entry in told(host)] == [WaitKind.MESSAGE]

    run(test, engine=FakeEngine(auto=False))


@pytest.mark.parametrize(
    ("seconds", "kind", "param"),
    [
        (1.0, b"chat", "kind"),
        (1.0, b"", "kind"),
        (1.0, b"\xff" * 1000, "kind"),
        (-1.0, b"tool", "expected_in_s"),
        (math.inf, b"tool", "expected_in_s"),
    ],
)
def test_a_wait_that_cannot_be_said_is_refused_by_name(seconds: float, kind: bytes, param: str) -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        program.say(Op.SEQ_EXPECT, 1, seconds, kind, call=5)
        program.look()
        [error] = [event for event in program.seen if event.call == 5]
        assert program.error_in(error) == ("invalid_request", param)
        await settle()
        assert told(host) == []

    run(test)


def test_the_engine_knows_until_when_a_program_sleeps() -> None:
    async def test(host: Host) -> None:
        assert isinstance(host.engine, SteppedEngine)
        program = host.program()
        opened(program)
        await program.result(Op.SEQ_GENERATE, 1, 0, obj({"stop": {"max_tokens": 2}}))
        program.ask(Op.SLEEP, 12.0)
        await settle()
        await host.engine.drained()
        [sequence] = host.engine.engine.scheduler.sequences
        assert sequence.wait_kind == WaitKind.SLEEP
        assert sequence.expected_s is not None
        assert 0 < sequence.expected_s - sequence.last_active_s <= 13.0

    on_engine(test)


def test_the_space_of_a_program_waits_as_its_sequences_do() -> None:
    info = msgspec.structs.replace(DEFAULT_INFO, explicit_pages=True, num_embeds=100, max_space_pages=50)

    def told_of_pages(host: Host) -> list[tuple[str, float | None]]:
        found = [(e.kind, e.expected_in_s) for e in host.engine.sent if isinstance(e, ExpectSpace)]
        host.engine.sent.clear()
        return found

    async def test(host: Host) -> None:
        program = host.program()
        program.ask(Op.RECEIVE)
        await settle()
        assert told_of_pages(host) == [], "it has no space"
        program.say(Op.QUEUE_OPEN, 1, 0)
        for _ in range(2):
            program.ask(Op.RECEIVE)
        await settle()
        assert told_of_pages(host) == [(WaitKind.MESSAGE, None)], "what the engine knows is said once"
        program.say(Op.QUEUE_PRIORITY, 1, 3)
        program.ask(Op.SLEEP, 12.5)
        await settle()
        assert told_of_pages(host) == [(WaitKind.SLEEP, 12.5)], "a command has ended the wait"
        program.ask(Op.QUEUE_SYNC, 1)
        program.ask(Op.RECEIVE)
        await settle()
        assert told_of_pages(host) == [], "it waits for the device, too"

    run(test, engine=FakeEngine(info, auto=False))
