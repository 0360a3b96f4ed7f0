"""Work waits in order for room of number and bytes, and what gives up makes way."""

import asyncio

import pytest

from tests.programs.help import settle
from weft.programs.run.calls.ordered_room import OrderedRoom


class Work:
    """Pieces of work that begin when there is room and end when a test says so."""

    def __init__(self, most: int, most_bytes: int):
        self.room = OrderedRoom(most, most_bytes)
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def add(self, number: int, num_bytes: int = 1) -> None:
        self.ends[number] = asyncio.Event()

        async def work() -> None:
            async with self.room.hold(num_bytes):
                self.begun.append(number)
                await self.ends[number].wait()

        self.tasks[number] = asyncio.ensure_future(work())
        await settle(3)

    async def end(self, number: int) -> None:
        self.ends[number].set()
        await settle(3)


def test_number_and_bytes_bound_what_is_under_way_in_order() -> None:
    async def body() -> None:
        work = Work(2, 10)
        for number, num_bytes in enumerate([4, 4, 1, 9, 1]):
            await work.add(number, num_bytes)
        assert work.begun == [0, 1]
        await work.end(0)
        # 9 more bytes do not fit yet, and the last one does not pass it.
        assert work.begun == [0, 1, 2]
        await work.end(1)
        assert work.begun == [0, 1, 2, 3]
        await work.end(2)
        assert work.begun == [0, 1, 2, 3, 4]
        await work.end(3)
        await work.end(4)
        await asyncio.gather(*work.tasks.values())

    asyncio.run(body())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_what_gives_up_makes_way(victim: int) -> None:
    async def body() -> None:
        work = Work(1, 10)
        for number in range(3):
            await work.add(number)
        work.tasks[victim].cancel()
        await settle(3)
        for number in range(3):
            await work.end(number)
        assert work.begun == [number for number in range(3) if number != victim or victim == 0]
        await work.add(9, 10)
        assert work.begun[-1] == 9
        await work.end(9)

    asyncio.run(body())


def test_one_that_gives_up_in_the_moment_of_its_turn_takes_nothing() -> None:
    async def body() -> None:
        work = Work(1, 10)
        for number in range(3):
            await work.add(number)
        work.ends[0].set()
        await work.tasks[0]
        work.tasks[1].cancel()
        await settle(5)
        assert work.begun in ([0, 2], [0, 1, 2])
        await work.end(1)
        await work.end(2)
        assert 2 in work.begun

    asyncio.run(body())
