"""A run is cancelled at every turn of its event loop, counted: no task, no call and no value is left of it."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

import weft
from tests.workflow.run.player import fake_answer
from weft import ops
from weft.abi.errors import Overloaded
from weft.workflow.graph.values import PartRanges
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.frames import Frame
from weft.workflow.run.instructions import RunProgram
from weft.workflow.run.prompt_cache import CallsInFlight, PromptCache
from weft.workflow.run.state import RunState

ROWS = 3


async def work(text: str) -> str:
    """Stands for the function of `World`, whose name it has."""
    return text


@weft.flow
def everything(q: Any) -> Any:
    first = ops.llm(f"Say {q}", temperature=0)
    value = ops.function(work, f"{first}")
    parts = ops.split(f"{q} has several parts", max_tokens=9)
    notes = ops.map(lambda part: ops.llm(f"Of {part}", retries=2), parts)
    person = ops.external(timeout_s=60.0)
    draft = ops.loop(lambda text: ops.llm(f"Revise {text}"), value, max_rounds=2)
    return {"notes": notes, "draft": draft, "said": ops.program("agent", {"of": person})}


class World:
    """All that a run calls: each takes some turns, and counts who is inside."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.num_begun = 0
        self._kept: dict[str, ModelAnswer] = {}

    @contextmanager
    def _in(self, what: str) -> Iterator[None]:
        self.num_begun += 1
        self.inside[what] += 1
        try:
            yield
        finally:
            self.inside[what] -= 1

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        with self._in("call"):
            await asyncio.sleep(0)
            started()
            await asyncio.sleep(0)
            if self.num_begun % 5 == 0:
                raise Overloaded("full", retry_after_s=0.0)
        return fake_answer(request)

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        with self._in("split"):
            await asyncio.sleep(0)
        return [text[start:end] for start, end in ranges(range(len(text) + 1), lambda at: True)]

    async def work(self, text: str) -> str:
        with self._in("function"):
            await asyncio.sleep(0)
        return text.upper()

    async def program(self, asked: RunProgram) -> Any:
        with self._in("program"):
            await asyncio.sleep(0)
        return asked.args

    async def external(self, instruction: Any) -> Any:
        with self._in("external"):
            await asyncio.sleep(0)
        return {"row": instruction.task.row}

    async def rows(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        with self._in("rows"):
            for number in range(ROWS):
                await asyncio.sleep(0)
                yield number, {"q": f"row {number}"}

    async def found(self, key: str) -> ModelAnswer | None:
        with self._in("cache"):
            await asyncio.sleep(0)
        return self._kept.get(key)

    def keep(self, key: str, answer: ModelAnswer) -> None:
        self._kept[key] = answer


class WorldCache(PromptCache):
    """A prompt cache without a database."""

    def __init__(self, world: World):
        self.in_flight: CallsInFlight = {}
        super().__init__(None, "model", in_flight=self.in_flight)  # type: ignore[arg-type]
        self._world = world

    async def _found(self, key: str, *, marks_use: bool) -> ModelAnswer | None:
        return await self._world.found(key)

    def _put(self, key: str, answer: ModelAnswer) -> None:
        self._world.keep(key, answer)


async def cancelled_at(turn: int) -> bool:
    """Cancel a run at a turn of the loop. Returns whether it had ended before."""
    world = World()
    cache = WorldCache(world)
    services = RunServices(
        world,
        dict.fromkeys(everything.functions, world.work),
        program=world.program,
        external=world.external,
        cache=cache,
    )
    state = RunState(everything.graph)
    told: list[Any] = []

    async def consume() -> None:
        driver = Driver(state, world.rows(), services, Concurrency(rows=2, calls=3, waiting_calls=2, functions=1))
        async with aclosing(driver.results()) as results:
            async for done in results:
                assert done.failure is None, done.failure
                told.append(done.row)

    running = asyncio.create_task(consume())
    for _ in range(turn):
        await asyncio.sleep(0)
    had_ended = running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled() or had_ended
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not +world.inside, world.inside
    assert not cache.in_flight
    assert not had_ended or sorted(told) == list(range(ROWS))
    return had_ended


def num_frames() -> int:
    gc.collect()
    return sum(type(each) is Frame for each in gc.get_objects())


def test_a_run_that_is_cancelled_at_any_turn_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workflow.run.state.FIRST_PAUSE_S", 0.0)
    turn, before = 0, num_frames()
    while not asyncio.run(cancelled_at(turn)):
        turn += 1
    assert turn > 30
    assert num_frames() == before, "values of rows live on"
