"""Lists of sessions that a client waits for: answers find their question, and the engine's death ends the wait."""

from __future__ import annotations

import asyncio

import pytest

from weft.abi.errors import EngineDead
from weft.core import wire
from weft.engine.request_tracker import RequestTracker
from weft.testing.fake_engine import DEFAULT_INFO


def test_answers_are_matched_by_number_and_end_with_the_engine() -> None:
    async def main() -> None:
        sent: list[wire.Command] = []
        tracker = RequestTracker(sent.extend)
        with pytest.raises(EngineDead):
            await tracker.sessions("t", 5)
        assert not sent
        tracker.begin(DEFAULT_INFO)
        first, second, third = (asyncio.create_task(tracker.sessions("t", limit)) for limit in (1, 2, 3))
        await asyncio.sleep(0)
        asked = [command for command in sent if isinstance(command, wire.ListSessions)]
        assert [(command.tenant, command.limit) for command in asked] == [("t", 1), ("t", 2), ("t", 3)]
        third.cancel()
        await asyncio.sleep(0)
        answers = [wire.Sessions(query=command.query, sessions=[], total=command.limit) for command in asked]
        tracker.receive(wire.Envelope(0, [answers[2], answers[1]]))
        assert (await second).total == 2
        assert not first.done()
        tracker.fail(EngineDead("it died"))
        with pytest.raises(EngineDead, match="it died"):
            await first
        assert not tracker._queries

    asyncio.run(main())


def test_a_task_that_gives_up_waiting_for_an_engine_leaves_nothing() -> None:
    async def main() -> None:
        tracker = RequestTracker(lambda commands: None)
        leaving, staying = (asyncio.create_task(tracker.until_ready()) for _ in range(2))
        await asyncio.sleep(0)
        assert len(tracker._arrivals) == 2
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert len(tracker._arrivals) == 1
        tracker.begin(DEFAULT_INFO)
        assert await staying is DEFAULT_INFO
        assert not tracker._arrivals

    asyncio.run(main())
