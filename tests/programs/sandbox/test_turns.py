"""Turns of guests that share a loop."""

from __future__ import annotations

import asyncio

from tests.programs.sandbox.help import execute
from weft.programs.sandbox.turns import Turns


def test_so_many_per_pass_in_order_and_cancelled_ones_take_none() -> None:
    async def run() -> list[list[int]]:
        turns = Turns(2)
        had: list[int] = []

        async def wait(number: int) -> None:
            await turns.next()
            had.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(7)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        passes = []
        while len(had) < 6:
            before = len(had)
            await asyncio.sleep(0)
            if had[before:]:
                passes.append(had[before:])
        assert tasks[3].cancelled()
        return passes

    assert execute(run()) == [[0, 1], [2, 4], [5, 6]]


def test_a_queue_outlives_its_loop_s_end() -> None:
    turns = Turns(1)

    async def abandoned() -> None:
        waiting = [asyncio.ensure_future(turns.next()) for _ in range(3)]
        await waiting[0]
        for task in waiting:
            task.cancel()

    asyncio.run(abandoned())
    execute(turns.next())
