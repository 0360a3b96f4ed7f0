"""The program host as a process of its own: served beside a real engine, killed, hung, orphaned, restarted."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import textwrap
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tests.programs.help import settle
from tests.programs.host.help import Bench
from weft.abi.errors import HostDead, LimitExceeded, ModelLoadError, Overloaded, RunCancelled, UnknownProgram, WeftError
from weft.children import progress
from weft.children.progress import ProgressCounter
from weft.config import EMBEDDED_MODEL, EngineConfig, ProgramsConfig
from weft.engine.supervisor import ProcessEngine
from weft.programs.host import wire
from weft.programs.host.client import HostClient
from weft.programs.host.pipe import Pipe
from weft.programs.host.process import HostServer
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.host.wire import WINDOW_BYTES, HostArgs, HostedModel
from weft.programs.quota.limits import Limits
from weft.programs.registry import Code, Quota, checked_code
from weft.programs.run.runs import Run, RunSpec
from weft.programs.types import Caller

pytestmark = pytest.mark.slow

ENGINE = EngineConfig(dtype="float32", num_pages=256, max_running=16, threads=1)
CONFIG = ProgramsConfig(progress_deadline_s=5.0)
CALLER = Caller(tenant="t", namespace="t", request_id="q")
PATIENCE_S = 120

ECHO = """
    from weft.sdk import run
    async def main(args):
        run.log("noted")
        run.send({"got": args})
        return await run.receive()
"""
WRITE = """
    from weft.sdk import run
    from weft.sdk.errors import EngineDead
    from weft.sdk.sampling import Sampler, Stop
    from weft.sdk.sequence import Sequence

    async def write(count):
        seq = Sequence()
        seq.append([5, 6, 7])
        tokens = []
        async for part in seq.generate(Sampler(temperature=0), Stop(max_tokens=count, ignore_eos=True)):
            if not tokens:
                run.send("begun")
            tokens += part.tokens
        return len(tokens)

    async def main(count):
        try:
            return await write(count)
        except EngineDead:
            run.send("lost")
            await run.receive()
        while True:
            try:
                return await write(3)
            except EngineDead:  # the program host is about to hear that it is back
                await run.sleep(0.01)
"""
GETPID = "import os\ndef main(args):\n    return os.getpid()\n"


def spec(source: str, args: bytes = b"null", **fields: object) -> RunSpec:
    return RunSpec(code=checked_code(textwrap.dedent(source).encode(), "python", Quota(), "prog"), args=args, **fields)


class NoEngine:
    """An engine that never comes."""

    on_ready_change: Callable[[bool], None] | None = None
    address: str | None = None


async def resolve(tenant: str, reference: str) -> Code:
    if (tenant, reference) != ("t", "child"):
        raise UnknownProgram(f"no {reference} of {tenant}", "program")
    return checked_code(b"async def main(args):\n    return [args, 'child']\n", None, Quota(), "child")


def client_for(engine: object, config: ProgramsConfig = CONFIG, **fields: object) -> HostClient:
    models = [HostedModel(name="tiny", model=EMBEDDED_MODEL)]
    return HostClient(HostArgs(models=models, config=config, **fields), [engine], resolve)


def run(test: Callable[[HostClient], Awaitable[None]], config: ProgramsConfig = CONFIG, **fields: object) -> None:
    """Without an engine: what does not need a model."""

    async def body() -> None:
        client = client_for(NoEngine(), config, **fields)
        try:
            await asyncio.wait_for(test(client), PATIENCE_S)
        finally:
            await client.close()
        assert not list(client.history.active())

    asyncio.run(body())


async def hears(run: Run, text: str) -> None:
    listener = run.messages()
    async for message in listener:
        if json.loads(message) == text:
            listener.close()
            return
    raise AssertionError(f"{run.record()} ended without saying {text}")


def test_runs_with_an_engine_that_dies_under_them() -> None:
    async def test() -> None:
        engine = ProcessEngine(ENGINE)
        client = client_for(engine)
        try:
            await engine.wait_ready()
            written = await client.start(spec(WRITE, b"5"), CALLER)
            assert await written.answer() == b"5", written.record()
            usage = written.record().usage
            assert (usage.prompt_tokens, usage.generated_tokens) == (3, 5)
            assert written.record().model == "tiny"

            long = await client.start(spec(WRITE, b"100000"), CALLER)
            await hears(long, "begun")
            back = asyncio.Event()
            front = engine.on_ready_change
            assert front is not None

            def on_change(ready: bool) -> None:
                front(ready)
                if ready:
                    back.set()

            engine.on_ready_change = on_change
            os.kill(engine.pid or 0, signal.SIGKILL)
            await hears(long, "lost")
            await back.wait()
            await long.deliver(b"null")
            assert await long.answer() == b"3"
            # Sequences of programs are gone with them.
            while (await engine.stats()).num_sequences:
                pass
        finally:
            await client.close()
            await engine.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_everything_of_a_run_arrives_here() -> None:
    async def test(client: HostClient) -> None:
        assert client.pid is None  # nothing runs before it is needed
        run = await client.start(spec(ECHO, b'{"a":1}'), CALLER)
        listener = run.messages()
        assert json.loads(await anext(listener)) == {"got": {"a": 1}}
        assert [line.text for line in run.logs()] == ["noted"]
        await run.deliver(b'"hi"')
        assert await run.answer() == b'"hi"'
        assert [message async for message in listener] == []
        record = run.record()
        assert (record.status, record.program, record.trusted) == ("finished", "prog", False)
        assert (record.usage.messages_sent, record.usage.messages_received) == (1, 1)
        trusted = await client.start(spec(GETPID, trusted=True), CALLER)
        assert int(await trusted.answer()) == client.pid

        waiting = await client.start(spec(ECHO, limits=Limits(message_bytes=12)), CALLER)
        with pytest.raises(LimitExceeded):
            waiting.send(b" " * 13)
        waiting.cancel("enough")
        with pytest.raises(RunCancelled, match="enough"):
            await waiting.answer()

    run(test)


def test_refusals_arrive_too() -> None:
    async def test(client: HostClient) -> None:
        with pytest.raises(WeftError, match="there are tiny"):
            await client.start(spec(ECHO, model="other"), CALLER)
        busy = await client.start(
            spec(
                "import asyncio\nasync def main():\n    await asyncio.sleep(3600)\n", limits=Limits(pending_messages=3)
            ),
            CALLER,
        )
        for _ in range(3):
            await busy.deliver(b"1")
        with pytest.raises(Overloaded):
            await busy.deliver(b"1")
        waiting = await client.start(spec(ECHO), CALLER)
        assert waiting.status == "queued"
        with pytest.raises(Overloaded, match="wait for a place"):
            await client.start(spec(ECHO), CALLER)
        assert len(client.history.runs("t")) == 2  # what was refused is no run
        waiting.cancel()
        assert (await waiting.wait()).status == "cancelled"
        await busy.refresh()
        assert busy.record().usage.messages_received >= 3

    run(test, ProgramsConfig(max_runs=1, max_waiting=1))


@pytest.mark.parametrize("is_up", [False, True], ids=["before the host", "after the host"])
def test_time_that_the_front_spends_for_a_tenant_is_of_its_rate(is_up: bool) -> None:
    async def test(client: HostClient) -> None:
        if is_up:
            await client.open()
        client.charge("t", 1e6)
        mine = await client.start(spec("def main(): pass\n"), CALLER)
        theirs = await client.start(spec("def main(): pass\n"), Caller(tenant="other"))
        await theirs.wait()
        assert (mine.status, theirs.status) == ("queued", "finished")

    run(test, msgspec.structs.replace(CONFIG, tenant_cpu_s_per_minute=60.0))


def test_children_by_name() -> None:
    source = """
        from weft.sdk import messaging
        async def main(name):
            return await messaging.launch(name, args=7).join()
    """

    async def test(client: HostClient) -> None:
        parent = await client.start(spec(source, b'"child"'), CALLER)
        assert json.loads(await parent.answer()) == [7, "child"]
        [child] = [one.record() for one in client.history.runs("t") if one.record().parent == parent.id]
        assert (child.program, child.status) == ("child", "finished")
        stranger = await client.start(spec(source, b'"child"'), Caller(tenant="u"))
        record = await stranger.wait()
        assert record.error is not None
        assert "no child of u" in record.error.message

    run(test)


def test_a_program_that_says_more_than_can_be_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front that does not take what is said is sent a window of it; here it tells of nothing that it took."""
    monkeypatch.setattr(wire, "READ_EVERY_BYTES", 1 << 40)
    source = """
        from weft.sdk import run
        def main(args):
            for _ in range(64):
                run.send("x" * 1_000_000)
    """

    async def test(client: HostClient) -> None:
        first = await client.start(spec("def main(): pass\n"), CALLER)
        await first.wait()
        run = await client.start(spec(source, trusted=True), CALLER)
        await run.wait()
        assert run.record().usage.messages_sent < 64
        assert run.record().usage.messages_sent <= WINDOW_BYTES // 1_000_000 + 2

    run(test)


def test_a_killed_host_fails_its_runs_and_comes_back() -> None:
    async def test(client: HostClient) -> None:
        runs = [await client.start(spec(ECHO), CALLER) for _ in range(3)]
        listener = runs[0].messages()
        await anext(listener)
        os.kill(client.pid or 0, signal.SIGKILL)
        for one in runs:
            with pytest.raises(HostDead, match="killed by SIGKILL"):
                await one.answer()
        assert [message async for message in listener] == []
        again = await client.start(spec(ECHO), CALLER)
        again.send(b"2")
        assert await again.answer() == b"2"
        assert client.num_restarts == 1

    run(test)


def test_an_endless_loop_ends_its_host() -> None:
    source = "def main(args):\n    while True: pass\n"

    async def test(client: HostClient) -> None:
        hung = await client.start(spec(source, trusted=True), CALLER)
        with pytest.raises(HostDead, match="computed without progress"):
            await hung.answer()

    run(test, ProgramsConfig(progress_deadline_s=0.3))


def test_a_host_that_stands_still_is_killed() -> None:
    async def test(client: HostClient) -> None:
        waiting = await client.start(spec(ECHO), CALLER)
        os.kill(client.pid or 0, signal.SIGSTOP)
        with pytest.raises(HostDead, match="did not answer"):
            await waiting.answer()

    run(test, ProgramsConfig(progress_deadline_s=1.0))


def test_a_ping_is_progress_of_a_host_without_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = ProgressCounter(tmp_path / "x.progress")
    monkeypatch.setattr(progress, "_own", ProgressCounter(tmp_path / "x.progress"))

    async def body() -> None:
        answered = asyncio.Event()
        address = f"ipc://{tmp_path}/host"
        server, front = HostServer([], address), Pipe(address, lambda data: answered.set(), bind=False)
        try:
            for number in range(1, 4):
                answered.clear()
                front.send(wire.encode(wire.PingHost()))
                await answered.wait()
                assert counter.read() == number
        finally:
            front.close()
            server.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


@pytest.mark.parametrize("waits", [False, True])
def test_an_ended_run_is_not_kept(tmp_path: Path, waits: bool) -> None:
    async def body() -> None:
        server, bench = HostServer([], f"ipc://{tmp_path}/host"), Bench(ProgramsConfig(max_runs=1))
        bench.host = ProgramHost(bench.parts, HostOptions(allow_trusted=True, max_ended=0))
        server.serve(bench.host)
        if waits:
            bench.launch(ECHO)
        run = bench.launch("def main():\n    return 1\n", trusted=False)
        ended = weakref.ref(run)
        if waits:
            run.cancel()
        await run.wait()
        del run
        await settle()
        assert ended() is None
        await bench.host.close()
        await bench.parts.close()
        server.close()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    finally:
        gc.enable()


def test_what_programs_store_survives_the_host(tmp_path: Path) -> None:
    put = "from weft.sdk import store\nasync def main(args):\n    await store.put('name', b'value')\n"
    get = (
        "from weft.sdk import store\nasync def main(args):\n    return (await store.get('name') or b'none').decode()\n"
    )

    async def test(client: HostClient) -> None:
        await (await client.start(spec(put), CALLER)).answer()
        waiting = await client.start(spec(ECHO), CALLER)
        os.kill(client.pid or 0, signal.SIGKILL)
        assert (await waiting.wait()).status == "failed"
        mine = await client.start(spec(get), CALLER)
        theirs = await client.start(spec(get), Caller(tenant="u"))
        assert (await mine.answer(), await theirs.answer()) == (b'"value"', b'"none"')

    run(test, store_folder=str(tmp_path / "below"))


def test_a_host_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def body() -> None:
        models = [HostedModel(name="x", model=str(tmp_path))]
        client = HostClient(HostArgs(models=models, config=CONFIG), [NoEngine()], resolve)
        for _ in range(2):
            with pytest.raises(ModelLoadError):
                await client.start(spec(ECHO), CALLER)
        await client.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_it_does_not_outlive_the_front() -> None:
    async def test(client: HostClient) -> None:
        run = await client.start(spec(GETPID, trusted=True), CALLER)
        pid = int(await run.answer())
        process = client.child.process
        assert process is not None
        assert process.stdin is not None
        folder = client.child.folder
        assert folder is not None
        assert any(folder.iterdir())
        process.stdin.close()  # what the system does for a front that was killed
        await process.wait()
        assert process.pid == pid
        assert not folder.exists()

    run(test)


def test_without_an_engine_a_program_hears_so() -> None:
    async def test(client: HostClient) -> None:
        run = await client.start(
            spec(
                "from weft.sdk.sequence import Sequence\nasync def main():\n    Sequence()\n"
                "    await Sequence().next_dist(3)\n"
            ),
            CALLER,
        )
        record = await run.wait()
        assert record.error is not None
        assert "the engine is starting or restarting" in record.error.message

    run(test)
