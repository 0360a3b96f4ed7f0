"""Sequences of a program: the pages and tokens that they may take, and the failures of their engine."""

import pytest

from tests.programs.help import settle
from tests.programs.run.sequence_calls import PROMPT, joined, opened
from tests.programs.sessions import Host, obj, run
from weft.abi.errors import LimitExceeded
from weft.abi.frames import EventKind, pack
from weft.abi.operations import Op
from weft.config import ProgramsConfig
from weft.core.ids import pack_tokens
from weft.programs import lasting
from weft.programs.quota.limits import Limits
from weft.programs.run.calls import pending_calls
from weft.programs.run.calls.generation import WHOLE
from weft.testing.fake_engine import FakeEngine


def test_what_was_made_before_an_engine_died_is_not_lost() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"abcdef"))
        program = host.program()
        opened(program)
        call = program.ask(Op.SEQ_GENERATE, 1, 5, obj({"stop": {"max_tokens": 6}}))
        await settle()
        for _ in range(2):
            host.engine.step()
        host.engine.die()
        await settle()
        assert program.kinds(call) == [EventKind.PART, EventKind.ERROR]
        assert program.parts(call)[0][1] == b"ab"

    run(test, engine=FakeEngine(auto=False))


def test_pages_of_sequences_count_and_shared_ones_once() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(pages=6))
        opened(program, 1, pack_tokens([1] * 33))
        assert program.budget.used.pages == 3
        for child in range(2, 8):
            program.say(Op.SEQ_FORK, 1, child)
        assert program.budget.used.pages == 3
        program.say(Op.SEQ_APPEND, 1, pack_tokens([1] * 15))
        assert program.budget.used.pages == 4, "48 tokens are three pages, one of them a copy"
        program.say(Op.SEQ_APPEND, 2, pack_tokens([1] * 16))
        assert program.budget.used.pages == 6
        program.say(Op.SEQ_APPEND, 3, pack_tokens([1] * 16), call=9)
        assert program.errors(9) == ["limit_exceeded"]
        program.say(Op.SEQ_RELEASE, 2)
        program.say(Op.SEQ_APPEND, 3, pack_tokens([1] * 16), call=10)
        assert program.errors(10) == []
        program.say(Op.SEQ_TRUNCATE, 3, 5)
        assert program.budget.used.pages == 4
        for number in (1, 3, 4, 5, 6):
            program.say(Op.SEQ_RELEASE, number)
        assert program.budget.used.pages == 3, "the last one still has them"
        program.say(Op.SEQ_RELEASE, 7)
        assert program.budget.used.pages == 0
        assert program.budget.used.pages_peak == 6

    run(test)


def test_a_generation_ends_where_its_pages_do() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(pages=2))
        opened(program, 1, pack_tokens([1] * 30))
        call = program.ask(Op.SEQ_GENERATE, 1, 1, b'{"stop":{"ignore_eos":true}}')
        assert program.error_in(await program.end_of(call)) == ("limit_exceeded", "pages")
        assert len(joined(program, call)[0]) == 3
        await settle()
        assert host.engine.idle
        assert program.outlet.ended == []

    run(test)


def test_the_end_of_a_generation_is_told_once_where_its_pages_end_too() -> None:
    async def test(host: Host) -> None:
        host.engine.script(list(b"abc"))
        program = host.program(Limits(pages=2))
        opened(program, 1, pack_tokens([1] * 30))
        call = program.ask(Op.SEQ_GENERATE, 1, 1 + WHOLE, obj({"stop": {"max_tokens": 3}}))
        await settle()
        host.engine.step(10)
        await settle()
        assert program.kinds(call) == [EventKind.PART, EventKind.ERROR]
        assert program.parts(call)[0][1] == b"abc"

    run(test, engine=FakeEngine(auto=False))


def test_what_generations_hold_is_bounded_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "MAX_HELD_BYTES", 50_000)

    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        asked = obj({"stop": {"max_tokens": 1}}) + b" " * 20_000
        for _ in range(3):
            calls = [program.ask(Op.SEQ_GENERATE, 1, 0, asked) for _ in range(3)]
            assert program.errors(calls[2]) == ["overloaded"]
            await settle()
            host.engine.step(10)
            for call in calls[:2]:
                assert (await program.end_of(call)).kind == EventKind.RESULT

    run(test, engine=FakeEngine(auto=False))


def test_operations_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "MAX_WAITING_BYTES", 10 * lasting.ENTRY_BYTES)

    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        for _ in range(20):  # nothing waits
            program.say(Op.SEQ_MASK, 1, b"", call=9)
        call = program.ask(Op.SEQ_GENERATE, 1, 0, obj({"stop": {"max_tokens": 3}}))
        for _ in range(9):
            program.say(Op.SEQ_MASK, 1, b"", call=9)
        assert program.errors(9) == []
        program.say(Op.SEQ_MASK, 1, b"", call=9)
        program.say(Op.SEQ_FORK, 1, 2, call=10)
        program.say(Op.SEQ_APPEND, 1, PROMPT, call=11)
        assert [program.errors(number) for number in (9, 10, 11)] == [["overloaded"]] * 3
        program.say(Op.SEQ_CANCEL, 1)
        await settle()
        host.engine.step(5)
        assert program.error_in(await program.end_of(call))[0] == "cancelled"
        program.say(Op.SEQ_FORK, 1, 3, call=12)
        call = program.ask(Op.SEQ_GENERATE, 1, 0, obj({"stop": {"max_tokens": 3}}))
        program.say(Op.SEQ_MASK, 1, b"", call=12)
        assert program.errors(12) == []

    run(test, engine=FakeEngine(auto=False))


def test_a_generation_that_uses_up_its_tokens_ends_the_run() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(tokens=10))
        opened(program)
        program.ask(Op.SEQ_GENERATE, 1, 1, b'{"stop":{"ignore_eos":true}}')
        await settle(100)
        assert [error.param for error in program.outlet.ended] == ["tokens"]
        with pytest.raises(LimitExceeded):
            program.say(Op.LOG, 0, b"")
        program.close()

    run(test)


def test_a_tenant_s_pages_are_shared_by_its_programs() -> None:
    async def test(host: Host) -> None:
        one, two = host.program(), host.program()
        opened(one, 1, pack_tokens([1] * 40))
        two.say(Op.SEQ_OPEN, 1, 0)
        two.say(Op.SEQ_APPEND, 1, pack_tokens([1] * 40), call=9)
        assert two.errors(9) == ["out_of_pages"]
        one.say(Op.SEQ_RELEASE, 1)
        two.say(Op.SEQ_APPEND, 1, pack_tokens([1] * 40), call=10)
        assert two.errors(10) == []

    run(test, config=ProgramsConfig(max_pages_per_tenant=4))


def test_an_engine_dies_and_the_program_goes_on() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        running = program.ask(Op.SEQ_GENERATE, 1, 1, b"{}")
        scored = program.ask(Op.SEQ_SCORE, 1, 1, pack_tokens([1]))
        await settle()
        host.engine.step(2)
        host.engine.die()
        for call in (running, scored):
            assert program.error_in(await program.end_of(call))[0] == "engine_dead"
        assert len(joined(program, running)[0]) == 2
        assert (await program.error(Op.SEQ_DIST, 1, 1, b""))[0] == "engine_dead"
        assert (await program.error(Op.SEQ_GENERATE, 1, 1, b"{}"))[0] == "engine_dead"
        program.say(Op.SEQ_APPEND, 1, PROMPT, call=1)
        program.say(Op.SEQ_OPEN, 2, 0, call=2)
        assert program.errors(1) == program.errors(2) == []
        assert await program.result(Op.TOKENIZE, 0, b"a") == [pack_tokens([97])]
        host.engine.restart()
        call = program.ask(Op.SEQ_GENERATE, 1, 1, b'{"stop":{"max_tokens":2}}')
        await settle()
        host.engine.step(2)
        assert (await program.end_of(call)).kind == EventKind.RESULT
        [sequence] = host.engine.sequences.values()
        assert sequence.tokens[:-2] == [*b"prompt", *joined(program, running)[0], *b"prompt"]
        assert program.outlet.ended == []

    run(test, engine=FakeEngine(auto=False))


def test_an_error_of_the_engine_is_the_call_s() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        opened(program)
        host.engine.fail_next("out_of_pages")
        assert (await program.error(Op.SEQ_SCORE, 1, 1, pack_tokens([1])))[0] == "out_of_pages"
        program.say(Op.SEQ_OPEN, 2, 0)
        program.say(Op.SEQ_APPEND, 2, pack_tokens([1] * 5000), call=2)
        assert program.errors(2) == ["context_too_long"]
        assert program.session.usage().prompt_tokens == 7, "what was refused was not appended"
        assert (await program.result(Op.SEQ_SCORE, 2, 1, pack_tokens([1])))[0]

    run(test)


def test_a_million_commands_are_counted_one_by_one() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(host_calls=5))
        program.say(Op.SEQ_OPEN, 1, 0)
        with pytest.raises(LimitExceeded, match="host_calls"):
            program.session.commands(pack(Op.SEQ_APPEND, 1, 1, PROMPT) * 100_000)
        assert program.session.usage().prompt_tokens == 4 * 6

    run(test)
