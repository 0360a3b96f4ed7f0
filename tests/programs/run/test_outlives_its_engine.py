"""Runs whose engine dies while they wait: contexts go on without their help, and lost pages are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from tests.programs.help import settle
from tests.programs.killable_engine import KillableEngine
from tests.programs.sessions import Host, Program, obj
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.core.ids import pack_tokens, unpack_tokens
from weft.programs.runtime import Runtime
from weft.testing.fake_worker import expected_tokens

VOCAB = 264


def on_engine(test: Callable[[Host, KillableEngine], Coroutine[None, None, None]], **spec: object) -> None:
    """Run a test on a host whose calls wait for an engine; afterwards, host and engine must hold nothing."""

    async def body() -> None:
        engine = KillableEngine(**spec)
        host = Host(engine)  # type: ignore[arg-type]
        await test(host, engine)
        for program in host.programs:
            program.close()
        await settle()
        await engine.drained()
        engine.check_empty()
        assert host.rt.num_sequences == host.rt.num_operations == 0
        assert host.accounts.num_pages == 0
        await host.close()
        await engine.close()

    asyncio.run(body())


def answer(program: Program, number: int, seed: int) -> int:
    about = obj({"sampling": {"seed": seed}, "stop": {"max_tokens": 3, "ignore_eos": True}})
    return program.ask(Op.SEQ_GENERATE, number, 4, about)


async def tokens_of(program: Program, call: int) -> list[int]:
    assert (await program.end_of(call)).kind == EventKind.RESULT
    [part] = [event for event in program.seen if event.call == call and event.kind == EventKind.PART]
    return list(unpack_tokens(part.blobs[0]))


def contexts_that_wait(num_programs: int, num_contexts: int) -> None:
    async def test(host: Host, engine: KillableEngine) -> None:
        known: dict[tuple[Program, int], list[int]] = {}
        for at in range(num_programs):
            program = host.program()
            for number in range(num_contexts):
                tokens = [at % 250, number, *range(20)]
                program.say(Op.SEQ_OPEN, number, 0)
                program.say(Op.SEQ_APPEND, number, pack_tokens(tokens))
                found = await tokens_of(program, answer(program, number, 5))
                assert found == expected_tokens(tokens, 5, 3, VOCAB)
                known[program, number] = tokens + found
        engine.die()
        engine.restart()
        await settle()
        assert len(engine.engine.scheduler.sequences) == 0, "nothing is computed before it is needed"
        calls = {key: answer(*key, 6) for key in known}
        for (program, number), call in calls.items():
            tokens = known[program, number]
            assert await tokens_of(program, call) == expected_tokens(tokens, 6, 3, VOCAB)
        assert all(program.outlet.ended == [] for program, _ in known)

    on_engine(test, num_device_pages=300, num_slots=32)


def test_contexts_that_wait_outlive_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    contexts_that_wait(10, 10)


@pytest.mark.soak
def test_a_thousand_contexts_that_wait_outlive_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    contexts_that_wait(40, 25)


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of this test wait for their engine."""
    made = Runtime.__init__

    def init(runtime: Runtime, *args: object, **options: object) -> None:
        made(runtime, *args, **{**options, "engine_wait_s": 60.0})  # type: ignore[arg-type]

    monkeypatch.setattr(Runtime, "__init__", init)


def die(engine: KillableEngine) -> None:
    engine.die()
    engine.restart()


@pytest.mark.parametrize(("end", "why"), [(die, b"was killed"), (KillableEngine.end_lease, b"its lease (`lease_s`)")])
@pytest.mark.parametrize("under_way", [True, False])
def test_lost_pages_are_named_once_and_new_ones_can_be_had(
    under_way: bool, end: Callable[[KillableEngine], None], why: bytes
) -> None:
    async def test(host: Host, engine: KillableEngine) -> None:
        program = host.program()
        program.say(Op.QUEUE_OPEN, 1, 0)
        for first, count in ((3, 3), (9, 1)):
            assert (await program.end_of(program.ask(Op.PAGES_ALLOC, 1, first, count))).kind == EventKind.RESULT
        call = program.ask(Op.QUEUE_SYNC, 1) if under_way else 0
        end(engine)
        await settle()
        call = call or program.ask(Op.QUEUE_SYNC, 1)
        event = await program.end_of(call)
        assert event.blobs[0] == b"engine_dead"
        assert why in event.blobs[1]
        assert b"explicit KV pages are lost with it: 3-5, 9. Allocate" in event.blobs[1]
        await settle()
        assert program.budget.used.pages == 0
        program.say(Op.QUEUE_OPEN, 1, 0)
        assert (await program.end_of(program.ask(Op.PAGES_ALLOC, 1, 3, 3))).kind == EventKind.RESULT
        assert program.outlet.ended == []

    on_engine(test)


def test_many_pages_are_named_in_short() -> None:
    async def test(host: Host, engine: KillableEngine) -> None:
        program = host.program()
        program.say(Op.QUEUE_OPEN, 1, 0)
        for number in range(0, 40, 2):
            await program.end_of(program.ask(Op.PAGES_ALLOC, 1, number, 1))
        engine.die()
        engine.restart()
        event = await program.end_of(program.ask(Op.QUEUE_SYNC, 1))
        assert b"26, 28, 30 and 4 more ranges. Allocate" in event.blobs[1]

    on_engine(test)
