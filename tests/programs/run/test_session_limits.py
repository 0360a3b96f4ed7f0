"""Limits of a run's calls: what they may use and hold, what ends the run, and what is left after its end."""

import asyncio
import struct

import pytest

from tests.programs.help import settle
from tests.programs.sessions import Host, obj, run
from weft.abi.errors import LimitExceeded, Overloaded
from weft.abi.frames import EventKind, WireError, pack
from weft.abi.operations import MAX_COMMAND_BYTES, Op
from weft.config import ProgramsConfig
from weft.core.ids import pack_tokens
from weft.programs.quota.limits import Limits
from weft.programs.run.calls import pending_calls
from weft.programs.types import Caller


def test_limits_that_are_used_up_end_the_run() -> None:
    async def test(host: Host) -> None:
        calls = host.program(Limits(host_calls=10))
        with pytest.raises(LimitExceeded) as raised:
            calls.session.commands(pack(Op.LOG, 0, 0, b"") * 1_000_000)
        assert raised.value.param == "host_calls"
        assert len(calls.outlet.logs) == 10
        with pytest.raises(LimitExceeded):
            calls.say(Op.SEND, b"1")
        assert calls.outlet.messages == []
        logs = host.program(Limits(log_bytes=10))
        with pytest.raises(LimitExceeded, match="log_bytes"):
            logs.say(Op.LOG, 0, b"x" * 11)
        assert logs.outlet.logs == []
        tokens = host.program(Limits(tokens=3))
        tokens.say(Op.SEQ_OPEN, 1, 0)
        with pytest.raises(LimitExceeded, match="tokens"):
            tokens.say(Op.SEQ_APPEND, 1, pack_tokens([1, 2, 3, 4]))

    run(test)


def test_time_ends_a_run_between_its_calls() -> None:
    async def test(host: Host) -> None:
        # The timer begins a moment after the budget does; the message names the limit, not what was left then.
        program = host.program(Limits(wall_s=1e-9))
        for _ in range(1000):
            await asyncio.sleep(0)
            if program.outlet.ended:
                break
        assert [error.param for error in program.outlet.ended] == ["wall_s"]
        with pytest.raises(LimitExceeded, match="its limit wall_s of 1e-09 seconds"):
            program.say(Op.LOG, 0, b"")

    run(test)


def test_large_messages_are_refused_one_by_one() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(message_bytes=4))
        program.say(Op.SEND, b"[1,2]", call=1)
        program.say(Op.BROADCAST, b"t", b"[1,2]", call=2)
        assert program.errors(1) == program.errors(2) == ["limit_exceeded"]
        program.say(Op.SEND, b"[1]", call=3)
        assert program.outlet.messages == [b"[1]"]

    run(test)


def test_bytes_that_are_no_commands_end_the_run() -> None:
    async def test(host: Host) -> None:
        for data in (b"x", bytes(9), pack(Op.LOG, 0, 0, b"")[:-1] + b"", struct.pack("<IBI", 1 << 31, 1, 0)):
            with pytest.raises(WireError):
                host.program().session.commands(data)
        with pytest.raises(LimitExceeded, match="TOKENIZE has 16777226 bytes; the limit is 16777216"):
            pack(Op.TOKENIZE, 1, 0, bytes(MAX_COMMAND_BYTES))
        huge = pack(Op.TOKENIZE, 1, 0, bytes(MAX_COMMAND_BYTES - 10))
        longer = struct.pack("<I", MAX_COMMAND_BYTES + 1) + huge[4:] + b"x"
        with pytest.raises(WireError, match="the limit is 16777216"):
            host.program().session.commands(longer)

    run(test)


def test_a_program_that_asks_without_reading_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "MAX_UNREAD_BYTES", 10_000)

    async def test(host: Host) -> None:
        program = host.program()
        with pytest.raises(LimitExceeded, match="unread"):
            program.session.commands(b"".join(pack(Op.TOKENIZE, call, 0, b"x" * 100) for call in range(100)))
        assert [error.param for error in program.outlet.ended] == ["events"]

    run(test)


def test_calls_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "MAX_PENDING", 10)

    async def test(host: Host) -> None:
        program = host.program()
        for _ in range(10):
            program.ask(Op.SLEEP, 1e5)
        assert await program.error(Op.SLEEP, 0.0) == ("overloaded", "")
        assert await program.error(Op.STORE_GET, b"a") == ("overloaded", "")

    run(test)


def test_what_calls_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "MAX_HELD_BYTES", 50_000)

    async def test(host: Host) -> None:
        program = host.program()
        calls = [program.ask(Op.TOKENIZE, 0, b"x" * 20_000) for _ in range(3)]
        # One that is given up still holds its text, until its task has ended.
        program.say(Op.CANCEL, calls[0])
        assert program.error_in(await program.end_of(calls[2]))[0] == "overloaded"
        assert (await program.end_of(calls[1])).kind == EventKind.RESULT
        await program.result(Op.TOKENIZE, 0, b"x" * 40_000)
        large = {
            Op.TOKENIZE: (0, bytes(5 << 20)),
            Op.DETOKENIZE: (0, bytes(5 << 20)),
            Op.RENDER: (0, bytes(5 << 20), b"{}"),
            Op.SEQ_GENERATE: (1, 0, bytes(2 << 20)),
            Op.HTTP: (bytes(1 << 20), b""),
            Op.LAUNCH: (1, bytes(5 << 20)),
            Op.MATCHER_OPEN: (1, bytes(2 << 20)),
        }
        program.say(Op.SEQ_OPEN, 1, 0)
        for op, values in large.items():
            assert (await program.error(op, *values))[0] == "invalid_request", op

    run(test)


def test_a_number_in_use_is_refused() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        for op, values in {Op.SLEEP: (1e5,), Op.SUBSCRIBE: (b"t",), Op.RECEIVE: ()}.items():
            call = int(op)
            program.say(op, *values, call=call)
            # Neither the same number nor a failure that carries it ends what is under way, or makes us lose it.
            program.say(op, *values, call=call)
            program.say(Op.SEQ_RELEASE, 99, call=call)
            assert program.errors(call) == ["invalid_request", "unknown_handle"]
            program.say(Op.CANCEL, call)
            assert program.errors(call) == ["invalid_request", "unknown_handle", "cancelled"]

    run(test)


def test_our_own_failures_are_one_call_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(host: Host) -> None:
        program = host.program()

        async def broken(tenant: str, name: str) -> bytes:
            raise RuntimeError("a bug")

        monkeypatch.setattr(host.store, "get", broken)
        assert await program.error(Op.STORE_GET, b"a") == ("internal", "")
        assert await program.result(Op.TOKENIZE, 0, b"a") == [pack_tokens([97])]

    run(test)


def test_nothing_is_left_wherever_it_is_closed() -> None:
    async def test(host: Host) -> None:
        for turns in range(12):
            program = host.program()
            program.say(Op.SEQ_OPEN, 1, 0)
            program.say(Op.SEQ_APPEND, 1, pack_tokens([1, 2, 3]))
            program.ask(Op.SEQ_GENERATE, 1, 1, b"{}")
            program.ask(Op.SEQ_SCORE, 1, 1, pack_tokens([1]))
            program.say(Op.SEQ_FORK, 1, 2)
            program.ask(Op.SUBSCRIBE, b"t")
            program.ask(Op.RECEIVE)
            program.ask(Op.SLEEP, 1e4)
            program.ask(Op.STORE_PUT, b"a", b"b")
            program.ask(Op.TOKENIZE, 0, b"x" * 20000)
            program.ask(Op.VOCABULARY)
            program.ask(Op.LAUNCH, 3, obj({"program": "p"}))
            program.ask(Op.JOIN, 3)
            program.ask(Op.MATCHER_OPEN, 4, obj({"kind": "regex", "text": "a+"}))
            program.ask(Op.MATCHER_PUSH, 4, b"")
            await settle(turns)
            program.close()
            program.session.close()
            assert program.session.take_events() == b""
            program.say(Op.LOG, 0, b"after the end")
            assert program.outlet.logs == []

    run(test)


ANSWERING = {
    Op.RECEIVE: (),
    Op.SLEEP: (1e5,),
    Op.HTTP: (obj({"url": "http://example.com/"}), b""),
    Op.SUBSCRIBE: (b"t",),
    Op.LAUNCH: (9, obj({"program": "p"})),
    Op.JOIN: (8,),
    Op.TOKENIZE: (0, b"x" * 20_000),
    Op.DETOKENIZE: (0, bytes(20_000)),
    Op.VOCABULARY: (),
    Op.RENDER: (1, obj([{"role": "user", "content": "x" * 20_000}]), b"{}"),
    Op.SEQ_GENERATE: (7, 1, b"{}"),
    Op.SEQ_SCORE: (7, 1, pack_tokens([1, 2])),
    Op.STORE_PUT: (b"a", b"b"),
    Op.STORE_GET: (b"a",),
    Op.STORE_DELETE: (b"a",),
    Op.STORE_LIST: (b"",),
    Op.MATCHER_OPEN: (5, obj({"kind": "regex", "text": "a+"})),
    Op.MATCHER_PUSH: (6, b""),
}


@pytest.mark.parametrize("op", ANSWERING)
def test_a_call_given_up_at_any_moment_ends_once(op: Op) -> None:
    async def test(host: Host) -> None:
        for turns in range(10):
            program = host.program()
            program.say(Op.SEQ_OPEN, 7, 0)
            program.say(Op.SEQ_APPEND, 7, pack_tokens([1]))
            program.ask(Op.LAUNCH, 8, obj({"program": "p"}))
            program.ask(Op.MATCHER_OPEN, 6, obj({"kind": "regex", "text": "a+"}))
            call = program.ask(op, *ANSWERING[op])
            await settle(turns)
            program.say(Op.CANCEL, call)
            program.say(Op.CANCEL, call)
            await program.end_of(call)
            await settle()
            assert sum(kind != EventKind.PART for kind in program.kinds(call)) == 1
            # The program is none the worse for it.
            assert await program.result(Op.TOKENIZE, 0, b"a") == [pack_tokens([97])]
            program.close()

    run(test)


def test_caps_of_tenants_and_server() -> None:
    async def test(host: Host) -> None:
        host.program()
        host.program()
        with pytest.raises(Overloaded, match="tenant"):
            host.program()
        host.program(caller=Caller(tenant="b"))
        with pytest.raises(Overloaded, match="server"):
            host.program(caller=Caller(tenant="c"))

    run(test, config=ProgramsConfig(max_runs=3, max_runs_per_tenant=2))


def test_what_follows_a_refused_append_is_refused_until_the_program_knows() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(pages=1))
        program.say(Op.SEQ_OPEN, 1, 0)
        program.say(Op.SEQ_APPEND, 1, pack_tokens(range(5)))
        program.say(Op.SEQ_APPEND, 1, pack_tokens(range(60)), call=7)
        calls = [program.ask(Op.SEQ_GENERATE, 1, 0, obj({})), program.ask(Op.SEQ_DIST, 1, 3, b"")]
        program.say(Op.SEQ_FORK, 1, 2, call=8)
        program.say(Op.SEQ_MASK, 1, b"", call=9)
        assert [program.errors(call) for call in (7, 8, 9, *calls)] == [["limit_exceeded"]] * 5
        assert program.errors(program.ask(Op.SEQ_DIST, 1, 3, b"")) == []

    run(test)
