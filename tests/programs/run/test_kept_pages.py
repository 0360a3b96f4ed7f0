"""What ended runs keep, exports and holds, is bounded, makes way for others, and for its own tenant's first."""

import struct

import pytest

from tests.programs.run.test_runs_leave_nothing import on_engine
from tests.programs.sessions import Host, Program, obj
from tests.programs.stepped_engine import SteppedEngine
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.core.ids import pack_tokens
from weft.programs.types import Caller


def tenant(host: Host, name: str) -> Program:
    return host.program(caller=Caller(tenant=name, namespace=name))


def pages(count: int) -> bytes:
    return struct.pack(f"<{count}I", *range(1, count + 1))


def engine_of(host: Host) -> SteppedEngine:
    assert isinstance(host.engine, SteppedEngine)
    return host.engine


async def export(host: Host, name: str, key: bytes, count: int) -> None:
    """A run that exports pages and ends."""
    program = tenant(host, name)
    program.say(Op.QUEUE_OPEN, 1, 0)
    await program.result(Op.PAGES_ALLOC, 1, 1, count)
    await program.result(Op.PAGES_EXPORT, 1, pages(count), key)
    program.close()
    await engine_of(host).drained()


async def imports(host: Host, name: str, key: bytes) -> bool:
    program = tenant(host, name)
    program.say(Op.QUEUE_OPEN, 1, 0)
    event = await program.end_of(program.ask(Op.PAGES_IMPORT, 1, 1, key))
    program.close()
    await engine_of(host).drained()
    return event.kind is EventKind.RESULT


def test_exports_of_ended_runs_make_way_for_pages_of_others() -> None:
    async def test(host: Host) -> None:
        most = host.model.info.max_space_pages
        for number in range(6):
            await export(host, "a", b"%d" % number, most // 4)
        assert engine_of(host).engine.scheduler.spaces.num_pages <= most
        assert host.accounts.num_pages == 0
        other = tenant(host, "b")
        other.say(Op.QUEUE_OPEN, 1, 0)
        await other.result(Op.PAGES_ALLOC, 1, 1, most)
        assert not await imports(host, "a", b"5")

    on_engine(test)


def test_a_flood_of_exports_pushes_out_those_of_its_own_tenant_first() -> None:
    async def test(host: Host) -> None:
        most = host.model.info.max_space_pages
        await export(host, "b", b"kept", 4)
        for number in range(20):
            await export(host, "a", b"%d" % number, most // 4)
        assert await imports(host, "b", b"kept")
        assert await imports(host, "a", b"19")
        assert not await imports(host, "a", b"0")

    on_engine(test)


@pytest.mark.parametrize("seconds", [1000.0, 86400.0])
def test_holds_of_ended_runs_have_a_share_and_make_way_for_what_runs(seconds: float) -> None:
    async def test(host: Host) -> None:
        engine = engine_of(host).engine
        total = engine.info.num_device_pages
        for number in range(12):
            program = tenant(host, "a")
            program.say(Op.SEQ_OPEN, 1, 0)
            program.say(Op.SEQ_APPEND, 1, pack_tokens([number] * 100))
            await program.result(Op.SEQ_GENERATE, 1, 0, obj({"stop": {"max_tokens": 1}}))
            program.say(Op.SEQ_HOLD, 1, seconds)
            program.close()
            await engine_of(host).drained()
        retention = engine.cache.retention
        assert 0 < retention.num_held < 12
        assert retention.num_pages <= retention.max_pages < total
        # Two sequences that take most of the device between them.
        other = tenant(host, "b")
        calls = []
        for number in (1, 2):
            other.say(Op.SEQ_OPEN, number, 0)
            other.say(Op.SEQ_APPEND, number, pack_tokens([50 + number] * 300))
            calls.append(other.ask(Op.SEQ_GENERATE, number, 0, obj({"stop": {"max_tokens": 15}})))
        for call in calls:
            assert (await other.end_of(call)).kind is EventKind.RESULT

    on_engine(test)


def test_a_program_reads_in_its_log_that_a_sequence_could_not_be_held() -> None:
    async def test(host: Host) -> None:
        program = tenant(host, "a")
        for number in range(1, 13):
            program.say(Op.SEQ_OPEN, number, 0)
            program.say(Op.SEQ_APPEND, number, pack_tokens([number] * 100))
            await program.result(Op.SEQ_GENERATE, number, 0, obj({"stop": {"max_tokens": 1}}))
            program.say(Op.SEQ_HOLD, number, 1000.0)
        await program.result(Op.SLEEP, 0.0)
        await engine_of(host).drained()
        levels, texts = zip(*program.outlet.logs, strict=True)
        assert 0 < len(texts) < 12
        assert set(levels) == {2}
        assert "released instead of held" in texts[0]
        assert "pages may be retained" in texts[0]

    on_engine(test)
