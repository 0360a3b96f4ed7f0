"""Runs from their launch to their one end: results, caps, queues, children, and cancellation in every state."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.programs.help import settle
from tests.programs.host.help import TENANT, Bench, spec, with_host
from weft.abi.errors import (
    Draining,
    EngineDead,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    ProgramFailed,
    RunCancelled,
    RunEnded,
    UnknownRun,
    Unsupported,
)
from weft.config import ProgramsConfig
from weft.core import wire
from weft.programs.host import wire as host_wire
from weft.programs.host.process import HostServer
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.host.run_task import RunTask
from weft.programs.quota.account import NoPlace
from weft.programs.quota.limits import Limits
from weft.programs.run.runs import Run, RunRecord
from weft.programs.types import Caller

ECHO = """
    from weft.sdk import run
    async def main(args):
        run.send({"got": args})
        run.log("noted")
        return [args, await run.receive()]
"""
WAIT = """
    from weft.sdk import run
    async def main(args):
        run.send("waiting")
        return await run.receive()
"""


def test_a_run_from_launch_to_end():
    async def test(bench: Bench) -> None:
        run = bench.launch(ECHO, b'{"a":1}')
        assert run.status == "running"
        listener = run.messages()
        await run.deliver(b'"hi"')
        assert json.loads(await run.answer()) == [{"a": 1}, "hi"]
        assert [json.loads(message) async for message in listener] == [{"got": {"a": 1}}]
        record = run.record()
        assert (record.status, record.tenant, record.program, record.model) == ("finished", "t", "program", "fake")
        assert record.created_s <= (record.started_s or 0) <= (record.finished_s or 0)
        assert (record.usage.messages_sent, record.usage.messages_received) == (1, 1)
        assert record.usage.host_calls > 0
        assert [(line.level, line.text) for line in run.logs()] == [("info", "noted")]
        with pytest.raises(RunEnded):
            run.send(b"1")
        run.cancel()
        assert run.status == "finished"
        assert bench.host.history.find("t", run.id) is run

    with_host(test)


def test_what_a_program_raises_is_told_with_its_own_lines():
    async def test(bench: Bench) -> None:
        run = bench.launch("def main(args):\n    raise ValueError('no such luck')\n")
        record = await run.wait()
        assert record.status == "failed"
        assert record.error is not None
        assert record.error.kind == "program_failed"
        assert "no such luck" in record.error.message
        assert "line 2, in main" in record.error.traceback
        with pytest.raises(ProgramFailed, match="no such luck"):
            await run.answer()

    with_host(test)


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_last_words_that_are_refused_are_not_lost(trusted: bool):
    source = """
        from weft.sdk import LimitExceeded, run
        async def main(args):
            run.send("x" * args["size"])
            if args["catch"]:
                try:
                    while True:
                        await run.sleep(0)
                except LimitExceeded:
                    return "caught"
            return "done"
    """

    async def test(bench: Bench) -> None:
        async def ended(size: int, catch: bool) -> RunRecord:
            args = json.dumps({"size": size, "catch": catch}).encode()
            return await bench.launch(source, args, limits=Limits(message_bytes=1000), trusted=trusted).wait()

        lost = await ended(2000, catch=False)
        assert lost.error is not None
        assert lost.error.kind == "program_failed"
        assert "2002 bytes; the limit is 1000" in lost.error.message
        assert (await ended(2000, catch=True)).status == "finished"
        assert (await ended(500, catch=False)).status == "finished"
        # So much is handed over within the program's own code.
        assert (await ended(100_000, catch=False)).status == "failed"
        assert (await ended(100_000, catch=True)).status == "finished"

    with_host(test)


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_a_message_that_is_refused_fails_the_next_call(trusted: bool):
    source = """
        from weft.sdk import LimitExceeded, run, store
        async def main(size):
            caught = []
            for call in (lambda: store.get("x"), run.receive, lambda: run.sleep(3600)):
                try:
                    run.send("x" * size)
                    await call()
                except LimitExceeded as error:
                    caught.append(error.param)
            return caught
    """

    async def test(bench: Bench) -> None:
        for size in (2000, 100_000):
            run = bench.launch(source, str(size).encode(), limits=Limits(message_bytes=1000), trusted=trusted)
            assert (await run.wait()).error is None
            assert run.result == b'["message_bytes","message_bytes","message_bytes"]'

    with_host(test)


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_a_call_that_is_too_large_fails_alone(trusted: bool):
    source = """
        from weft.sdk import Sequence, LimitExceeded, messaging, store, tokenize
        async def main(size):
            sequence, text = Sequence(), "x" * size
            caught = []
            for call in (
                lambda: store.put("x", text.encode()),
                lambda: tokenize(text),
                lambda: sequence.append(bytes(size)),
                lambda: messaging.launch(source="def main(): pass", args=text).join(),
            ):
                try:
                    await call()
                except LimitExceeded as error:
                    assert "16777216" in str(error), error
                    caught.append(error.param)
            await store.put("x", b"little")
            return caught
    """

    async def test(bench: Bench) -> None:
        run = bench.launch(source, b"17000000", limits=Limits(memory_bytes=256 << 20), trusted=trusted)
        assert (await run.wait()).error is None
        assert run.result == json.dumps(["command_bytes"] * 4, separators=(",", ":")).encode()

    with_host(test)


def test_tokens_are_counted():
    async def test(bench: Bench) -> None:
        run = bench.launch("""
            from weft.sdk.sampling import Stop
            from weft.sdk.sequence import Sequence
            async def main(args):
                seq = Sequence()
                seq.append([1, 2, 3])
                tokens = []
                async for step in seq.generate(stop=Stop(max_tokens=4)):
                    tokens += step.tokens
                return len(tokens)
        """)
        record = await run.wait()
        assert record.error is None, record.error
        assert run.result == b"4"
        assert (record.usage.prompt_tokens, record.usage.generated_tokens) == (3, 4)

    with_host(test)


def test_untrusted_and_unknown():
    async def test(bench: Bench) -> None:
        closed = ProgramHost(bench.parts, HostOptions())
        with pytest.raises(Unsupported, match="sandbox"):
            closed.launch(spec(ECHO), TENANT)
        with pytest.raises(InvalidRequest, match="there are fake"):
            bench.launch(ECHO, model="other")
        with pytest.raises(UnknownRun):
            bench.host.history.find("t", "run-0")
        run = bench.launch(WAIT)
        with pytest.raises(UnknownRun):
            bench.host.history.find("somebody else", run.id)
        with pytest.raises(InvalidRequest, match="cancel it first"):
            bench.host.history.forget("t", run.id)

    with_host(test)


def test_cancel_while_it_waits_for_its_place():
    async def test(bench: Bench) -> None:
        first, second, third = (bench.launch(WAIT) for _ in range(3))
        assert [run.status for run in (first, second, third)] == ["running", "queued", "queued"]
        second.cancel("not wanted")
        assert second.status == "cancelled"
        assert second.record().started_s is None
        with pytest.raises(RunCancelled, match="not wanted"):
            await second.answer()
        first.send(b"1")
        await first.wait()
        await settle()
        assert third.status == "running"
        third.send(b"3")
        assert await third.answer() == b"3"

    with_host(test, ProgramsConfig(max_runs=1))


def test_cancel_at_every_await():
    """However many turns of the loop a run has had, cancelling it ends it at once, and leaves nothing."""

    async def test(bench: Bench) -> None:
        ended = set()
        for turns in range(40):
            run = bench.launch("""
                from weft.sdk import run
                from weft.sdk.sampling import Stop
                from weft.sdk.sequence import Sequence
                async def main(args):
                    run.send("begun")
                    seq = Sequence()
                    seq.append([1, 2, 3])
                    async for step in seq.generate(stop=Stop(max_tokens=3)):
                        run.send(step.tokens)
                    child = seq.fork()
                    return await run.receive()
            """)
            await settle(turns)
            run.cancel()
            record = await run.wait()
            ended.add(record.status)
            await settle()
            assert bench.runtime.num_sequences == 0
            assert not bench.host._active
        assert ended == {"cancelled"}

    with_host(test)


@pytest.mark.slow
def test_cancel_at_every_await_in_the_sandbox():
    source = """
        from weft.sdk import run
        from weft.sdk.sampling import Stop
        from weft.sdk.sequence import Sequence
        async def main(args):
            run.send("begun")
            seq = Sequence()
            seq.append([1, 2, 3])
            async for step in seq.generate(stop=Stop(max_tokens=3)):
                run.send(step.tokens)
            while args:
                pass
            return await run.receive()
    """

    async def test(bench: Bench) -> None:
        warm = bench.launch(source, trusted=False)
        warm.send(b"1")
        await warm.wait()
        for turns in range(30):
            run = bench.launch(source, str(turns % 2).encode(), trusted=False)
            await settle(turns)
            run.cancel()
            assert (await run.wait()).status == "cancelled"
            await settle()
            assert bench.runtime.num_sequences == 0
            assert not bench.host._active

    with_host(test)


def test_a_program_that_ignores_its_cancellation_ends():
    async def test(bench: Bench) -> None:
        run = bench.launch("""
            import asyncio
            async def main(args):
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        if args:
                            raise
                        args = 1
        """)
        await settle()
        run.cancel()
        assert (await run.wait()).status == "cancelled"

    with_host(test)


def test_caps_and_order():
    async def test(bench: Bench) -> None:
        mine = [bench.launch(WAIT) for _ in range(4)]
        other = bench.launch(WAIT, caller=Caller(tenant="u"))
        assert [run.status for run in mine] == ["running", "running", "queued", "queued"]
        assert other.status == "running"  # one tenant's queue keeps no other waiting
        mine += [bench.launch(WAIT) for _ in range(3)]
        with pytest.raises(Overloaded, match="wait for a place"):
            bench.launch(WAIT)
        order = []
        for run in mine:
            if run.status == "queued":
                await settle()
            run.send(b"null")
            await run.wait()
            order.append(run.id)
        assert order == [run.id for run in mine]

    with_host(test, ProgramsConfig(max_runs=3, max_runs_per_tenant=2, max_waiting=5))


def test_a_hundred_at_once():
    async def test(bench: Bench) -> None:
        runs = [bench.launch(ECHO, str(number).encode()) for number in range(100)]
        for number, run in enumerate(runs):
            await run.deliver(str(number * 2).encode())
        answers = await asyncio.gather(*(run.answer() for run in runs))
        assert [json.loads(answer) for answer in answers] == [[number, number * 2] for number in range(100)]

    with_host(test, ProgramsConfig(max_runs=30, max_runs_per_tenant=30))


def test_messages_before_it_starts_and_too_many_of_them():
    async def test(bench: Bench) -> None:
        first, second = bench.launch(WAIT), bench.launch(WAIT)
        await second.deliver(b'"early"')
        for _ in range(99):
            second.send(b"1")
        with pytest.raises(Overloaded):
            second.send(b"1")
        with pytest.raises(LimitExceeded):
            second.send(b" " * (2 << 20))
        first.cancel()
        assert await second.answer() == b'"early"'

    with_host(test, ProgramsConfig(max_runs=1))


def test_messages_of_runs_that_wait_are_bounded_in_bytes():
    async def test(bench: Bench) -> None:
        text = b'"' + b"x" * (15 << 20) + b'"'
        first, *waiting, last = (bench.launch(WAIT, limits=Limits(message_bytes=16 << 20)) for _ in range(19))
        assert {run.status for run in waiting} == {"queued"}
        for run in waiting:
            run.send(text)
        with pytest.raises(Overloaded, match="has not started"):
            run.send(b" " * (1 << 20))
        with pytest.raises(Overloaded, match="arguments, sources and messages"):
            last.send(text)
        run.cancel()
        last.send(text)
        for run in (first, *waiting[1:]):
            run.cancel()
        assert await waiting[0].answer() == text
        assert await last.answer() == text
        await settle()
        assert not bench.host._input_bytes

    with_host(test, ProgramsConfig(max_runs=1))


def test_children_end_with_their_parent():
    async def test(bench: Bench) -> None:
        run = bench.launch("""
            from weft.sdk import messaging, run
            async def main(args):
                child = messaging.launch(source="async def main(args):\\n    return args", args=3)
                return await child.join()
        """)
        record = await run.wait()
        assert record.error is None, record.error
        assert run.result == b"3"
        children = [one for one in bench.host.history.runs("t") if one.record().parent == run.id]
        assert [one.status for one in children] == ["finished"]
        assert not children[0].record().trusted  # what a program makes up runs in the sandbox

        parent = bench.launch("""
            from weft.sdk import messaging, run
            async def main(args):
                source = "from weft.sdk import run\\nasync def main():\\n    return await run.receive()"
                children = [messaging.launch(source=source) for _ in range(3)]
                for child in children:
                    await child.started()
                run.send("launched")
                await run.receive()
        """)
        await anext(parent.messages())
        children = [one for one in bench.host.history.runs("t") if one.record().parent == parent.id]
        assert [one.status for one in children] == ["running"] * 3
        parent.cancel()
        await parent.wait()
        assert {(await one.wait()).status for one in children} == {"cancelled"}

    with_host(test)


def test_an_engine_that_dies():
    source = """
        from weft.sdk import run
        from weft.sdk.sampling import Stop
        from weft.sdk.sequence import Sequence
        from weft.sdk.errors import EngineDead
        async def main(args):
            seq = Sequence()
            seq.append([1, 2, 3])
            try:
                async for step in seq.generate(stop=Stop(max_tokens=1000)):
                    pass
            except EngineDead:
                if not args:
                    raise
                await run.receive()
                again = Sequence()
                again.append([1, 2, 3])
                async for step in again.generate(stop=Stop(max_tokens=1)):
                    return "resumed"
    """

    async def generating(bench: Bench, count: int) -> None:
        def num() -> int:
            operations = [op for seq in bench.engine.sequences.values() for op in seq.operations]
            return sum(isinstance(op, wire.Generate) for op in operations)

        while num() < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def test(bench: Bench) -> None:
        careless = [bench.launch(source, trusted=trusted) for trusted in (True, False)]
        careful = bench.launch(source, b"true")
        await generating(bench, 3)
        bench.engine.die()
        for run in careless:
            with pytest.raises(EngineDead, match="engine") as raised:
                await run.answer()
            assert run.record().error.kind == "engine_dead"
            assert not str(raised.value).startswith("EngineDead")
        bench.engine.restart()
        careful.send(b"null")
        await generating(bench, 1)
        bench.engine.step(3)
        assert await careful.answer() == b'"resumed"'

    with_host(test, auto=False)


def test_closing_ends_everything():
    async def test(bench: Bench) -> None:
        runs = [bench.launch(WAIT) for _ in range(3)]
        await bench.host.close()
        assert [run.status for run in runs] == ["cancelled"] * 3
        with pytest.raises(Draining):
            bench.launch(WAIT)

    with_host(test, ProgramsConfig(max_runs=2))


def test_processor_time_that_ends_after_the_run_is_the_tenant_s() -> None:
    """A thread goes on with what a program has begun, and tells of it then."""

    async def test(bench: Bench) -> None:
        run = bench.launch("def main(): return 1")
        task = run.control
        assert isinstance(task, RunTask)
        await run.wait()
        await settle()
        task.charge(100.0)
        with pytest.raises(NoPlace, match="tenant_cpu_s_per_minute"):
            bench.parts.accounts.open(TENANT.tenant, Limits())

    with_host(test, ProgramsConfig(tenant_cpu_s_per_minute=60))


class Front:
    """A server of runs that tells a list."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.server = server = HostServer.__new__(HostServer)
        server._runs, server._refused, server._engines, server._given_up = {}, {}, [], set()
        server._launching = set()
        server.tell = self.told.append  # type: ignore[method-assign]


def test_a_message_to_a_run_that_is_being_launched_is_refused() -> None:
    async def check() -> None:
        front = Front()
        launching = asyncio.create_task(asyncio.Event().wait(), name="r")
        front.server._launching.add(launching)  # type: ignore[arg-type]
        for run in ("r", "over"):
            front.server._deliver(run, b"1")
            front.server._confirm(7, run)
        launching.cancel()
        assert [answer.error and answer.error.kind for answer in front.told] == ["overloaded", None]

    asyncio.run(check())


def test_a_launch_is_answered_whatever_happens() -> None:
    class Broken:
        def launch(self, *args: Any, **fields: Any) -> Run:
            raise KeyError("a fault of ours")

    async def check() -> None:
        front = Front()
        front.server._host = Broken()  # type: ignore[assignment]
        await front.server._launch(host_wire.LaunchRun(1, "r", spec("def main(): pass"), TENANT))
        [answer] = front.told
        assert "could not be launched" in answer.error.message

    asyncio.run(check())
