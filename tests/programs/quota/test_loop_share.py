"""When a pass of the event loop is counted."""

from __future__ import annotations

import asyncio

from weft.core.clock import ManualClock
from weft.programs.quota.loop_share import LoopShare


def test_only_a_pass_that_programs_have_used_noticeably_is_ended_by_a_callback() -> None:
    async def test() -> None:
        clock = ManualClock()
        share = LoopShare(pass_s=1.0, turn_s=0.25, clock=clock.now)

        def work(seconds: float) -> bool:
            """Whether a callback of the loop is due after a turn of so many seconds."""
            share.run(lambda goes_on: clock.advance(seconds) is not None)
            return share._next is not None

        assert [work(0.02), work(0.02), work(0.02)] == [False, False, True]
        work(1.0)
        assert share.is_used_up
        await asyncio.sleep(0)
        assert not share.is_used_up
        assert not work(0.02)

    asyncio.run(test())
