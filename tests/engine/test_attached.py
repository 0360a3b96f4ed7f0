"""A second client of an engine process: served beside the first, outlives the engine's death, keeps its lease."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from tests.engine.test_process import CONFIG, Listener, ending, request, restarted, run
from weft.abi.errors import EngineDead
from weft.core import wire
from weft.engine.attached import AttachedEngine
from weft.engine.supervisor import ProcessEngine


@pytest.mark.slow
def test_it_is_served_and_survives_the_engine() -> None:
    async def body() -> None:
        engine = ProcessEngine(msgspec.structs.replace(CONFIG, lease_s=1.0))
        other = AttachedEngine(ping_every_s=0.1)
        listener = Listener(other)
        with pytest.raises(EngineDead):
            other.send([wire.Open(seq=1)])
        await engine.wait_ready()
        assert engine.address is not None
        other.attach(engine.address)
        info = await other.wait_ready()
        assert info == engine.info
        other.send(request(1, 10, 4))
        assert isinstance(await listener.until(ending(10)), wire.Finished)

        # More than a lease later the sequence is still there: pings have renewed it.
        for _ in range(15):
            await other.stats()
            await asyncio.sleep(0.1)
        other.send([wire.Generate(seq=1, op=11, stop=request(1, 11, 2)[2].stop)])  # type: ignore[union-attr]
        assert isinstance(await listener.until(ending(11)), wire.Finished)

        other.send(request(2, 20, 200))
        os.kill(engine.pid or 0, signal.SIGKILL)
        down = asyncio.Event()
        engine.on_ready_change = lambda ready: None if ready else down.set()
        await down.wait()
        assert engine.address is None
        other.detach(EngineDead("gone"))
        failed = await listener.until(ending(20))
        assert isinstance(failed, wire.Failed)
        assert failed.error.kind == "engine_dead"
        assert not other.ready
        await restarted(engine)
        assert engine.address is not None
        other.attach(engine.address)
        await other.wait_ready()
        other.send(request(3, 30, 2))
        assert isinstance(await listener.until(ending(30)), wire.Finished)
        await other.close()
        with pytest.raises(EngineDead):
            other.send([wire.Open(seq=9)])
        assert (await engine.stats()).num_sequences >= 0  # the engine goes on without it
        await engine.close()

    run(body)
