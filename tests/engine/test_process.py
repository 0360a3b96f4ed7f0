"""The engine process: started, spoken to, killed, hung, orphaned, restarted."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from weft.abi.errors import EngineDead, ModelLoadError
from weft.config import EngineConfig
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.client import EngineClient
from weft.engine.connection import Connection
from weft.engine.supervisor import ProcessEngine

CONFIG = EngineConfig(dtype="float32", num_pages=256, max_running=16, threads=1, progress_deadline_s=2.0)
PATIENCE_S = 120


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), PATIENCE_S)

    asyncio.run(bounded())


class Listener:
    """Collects a client's events, and wakes tasks that wait for one."""

    def __init__(self, client: EngineClient | None = None):
        self.events: list[wire.Event] = []
        self._changed = asyncio.Event()
        if client is not None:
            client.subscribe(self.receive)

    def receive(self, envelope: wire.Envelope) -> None:
        self.events += envelope.events
        self._changed.set()

    async def until(self, condition: Callable[[wire.Event], bool]) -> wire.Event:
        while True:
            for event in self.events:
                if condition(event):
                    return event
            self._changed.clear()
            await self._changed.wait()


def ending(op: int) -> Callable[[wire.Event], bool]:
    return lambda event: isinstance(event, wire.Finished | wire.Failed | wire.Cancelled) and event.op == op


def request(seq: int, op: int, limit: int) -> list[wire.Command]:
    stop = StopParams(max_tokens=limit, ignore_eos=True)
    return [
        wire.Open(seq=seq),
        wire.Append(seq=seq, op=op + 1000, tokens=pack_tokens([5, 6, 7, 8])),
        wire.Generate(seq=seq, op=op, sampling=SamplingParams(temperature=0.0), stop=stop),
    ]


@pytest.fixture
def engine() -> ProcessEngine:
    return ProcessEngine(CONFIG)


async def restarted(engine: ProcessEngine) -> None:
    ready = asyncio.Event()
    engine.on_ready_change = lambda is_ready: ready.set() if is_ready else None
    if not engine.ready:
        await ready.wait()


async def generate(engine: ProcessEngine, listener: Listener, seq: int) -> wire.Event:
    engine.send(request(seq, seq, 5))
    return await listener.until(ending(seq))


def test_serves_and_closes_cleanly(engine: ProcessEngine) -> None:
    async def test() -> None:
        with pytest.raises(EngineDead):
            engine.send(request(1, 1, 1))
        info = await engine.wait_ready()
        assert info.pid == engine.pid != os.getpid()
        listener = Listener(engine)
        assert isinstance(await generate(engine, listener, 1), wire.Finished)
        assert sum(isinstance(event, wire.Token) for event in listener.events) == 5
        engine.send([wire.Release(seq=1)])
        assert (await engine.stats()).num_sequences == 0
        await engine.drain()
        engine.send(request(2, 2, 5))
        refused = await listener.until(lambda e: isinstance(e, wire.Failed) and e.error.kind == "draining")
        assert refused
        process = engine.child.process
        await engine.close()
        assert process is not None
        assert process.returncode == 0
        await engine.close()

    run(test)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_dead_engine_fails_its_requests_and_comes_back(engine: ProcessEngine, how: signal.Signals) -> None:
    async def test() -> None:
        first = await engine.wait_ready()
        listener = Listener(engine)
        engine.send(request(1, 1, 2000))
        await listener.until(lambda event: isinstance(event, wire.Token))
        os.kill(first.pid, how)
        failed = await listener.until(ending(1))
        assert isinstance(failed, wire.Failed)
        assert failed.error.kind == "engine_dead"
        assert "SIGKILL" in failed.error.message if how is signal.SIGKILL else "did not answer" in failed.error.message
        assert not engine.ready
        with pytest.raises(EngineDead, match="restarted"):
            engine.send(request(2, 2, 1))
        await restarted(engine)
        assert engine.info.pid != first.pid
        assert engine.num_restarts == 1
        assert isinstance(await generate(engine, listener, 3), wire.Finished)
        await engine.close()

    run(test)


def test_what_cannot_be_loaded_is_said_once_and_not_retried() -> None:
    async def test() -> None:
        engine = ProcessEngine(EngineConfig(model="/nowhere/model"))
        with pytest.raises(ModelLoadError, match="/nowhere/model"):
            await engine.wait_ready()
        with pytest.raises(ModelLoadError):
            await engine.wait_ready()
        assert engine.num_restarts == 0
        await engine.close()

    run(test)


def test_a_process_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def test() -> None:
        engine = ProcessEngine(CONFIG)
        with pytest.raises(EngineDead, match=r"cannot be started.*No space left"):
            await engine.wait_ready()
        await engine.close()

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    run(test)


def test_several_clients_have_handles_of_their_own_and_lose_them_with_their_lease() -> None:
    engine = ProcessEngine(EngineConfig(dtype="float32", num_pages=256, max_running=16, threads=1, lease_s=3.0))

    async def connect() -> AsyncIterator[tuple[Connection, Listener]]:
        listener = Listener()
        connection = Connection(f"ipc://{engine.child.folder}/engine-0-{os.getpid()}", listener.receive)
        connection.send([wire.Hello()])
        await listener.until(lambda event: isinstance(event, wire.Welcome))
        yield connection, listener
        connection.close()

    async def test() -> None:
        await engine.wait_ready()
        mine = Listener(engine)
        engine.send(request(1, 1, 3))
        await mine.until(ending(1))
        async for connection, theirs in connect():
            connection.send([wire.Generate(seq=1, op=9)])
            foreign = await theirs.until(ending(9))
            assert isinstance(foreign, wire.Failed)
            assert foreign.error.kind == "unknown_handle"
            connection.send(request(1, 1, 3))
            assert isinstance(await theirs.until(ending(1)), wire.Finished)
            assert (await engine.stats()).num_sequences == 2
        while (await engine.stats()).num_sequences != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # the other client's lease runs out; this one's pings keep its own
        await engine.close()

    run(test)


def test_an_orphan_ends() -> None:
    async def test() -> None:
        engine = ProcessEngine(CONFIG)
        await engine.wait_ready()
        process = engine.child.process
        assert process is not None
        assert process.stdin is not None
        assert engine.child.folder is not None
        assert any(engine.child.folder.iterdir())
        process.stdin.close()  # what the system does for a parent that was killed
        await process.wait()
        assert not engine.child.folder.exists()
        await engine.close()

    run(test)
