"""Slots of functions go to the earliest row that waits, and none is lost."""

from __future__ import annotations

import asyncio
import random

from weft.workflow.run.slots import RowSlots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_earliest_row_that_waits_is_next() -> None:
    async def run() -> list[int]:
        slots, began, gates = RowSlots(2), [], {}

        async def work(row: int) -> None:
            async with slots.of(row):
                began.append(row)
                await gates.setdefault(len(began), asyncio.Event()).wait()

        tasks = [asyncio.create_task(work(row)) for row in (5, 6, 9, 7, 8, 7)]
        await settle()
        assert began == [5, 6]
        tasks.append(asyncio.create_task(work(1)))  # a further function of a row that began long ago
        for number in range(1, 8):
            await settle()
            gates[number].set()
        await asyncio.gather(*tasks)
        return began

    assert asyncio.run(run()) == [5, 6, 1, 7, 7, 8, 9]


def test_no_slot_is_lost_wherever_one_that_waits_is_cancelled() -> None:
    async def run(seed: int) -> None:
        draw, slots, running = random.Random(seed), RowSlots(3), 0

        async def work(row: int) -> None:
            nonlocal running
            async with slots.of(row):
                running += 1
                assert running <= 3
                try:
                    for _ in range(draw.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    running -= 1

        tasks = [asyncio.create_task(work(draw.randrange(10))) for _ in range(40)]
        while not all(task.done() for task in tasks):
            draw.choice(tasks).cancel()
            await asyncio.sleep(0)
        assert slots._num_free == 3
        assert not running

    for seed in range(50):
        asyncio.run(run(seed))
