"""A run of many rows keeps the rows in progress alone: counted in objects, since memory of a process is not exact."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workflow.run.test_driver import InstantBackend
from tests.workflow.shapes import Json, function, graph, llm, text
from weft.workflow.graph import graph_from_dict
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.state import RunState

ROWS_AT_ONCE = 50
ASK = graph(
    llm("a", "{{q}}"),
    llm("b", "same for all", temperature=0),
    text("t", "{{a}} {{b}}"),
    function("f", "f", x="{{t}}"),
    outputs={"f": "f"},
)


class ForgetfulBackend(InstantBackend):
    """Does not note what it is asked."""

    async def complete(self, request: ModelRequest, started: Any) -> ModelAnswer:
        answer = await super().complete(request, started)
        self.asked.clear()
        return answer


async def upper(x: str) -> str:
    return x.upper()


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def grown(num_rows: int) -> dict[str, int]:
    """By how much objects of each kind have grown, in the second half of a run."""

    def rows() -> Iterator[tuple[int, Json]]:
        for number in range(num_rows):
            yield number, {"q": f"row {number}"}

    async def main() -> dict[str, int]:
        services = RunServices(ForgetfulBackend(), {"f": upper})
        made = Driver(RunState(graph_from_dict(ASK)), rows(), services, Concurrency(rows=ROWS_AT_ONCE))
        half: Counter[str] = Counter()
        count = 0
        async for done in made.results():
            assert done.failure is None
            count += 1
            if count == num_rows // 2:
                half = live_objects()
        assert count == num_rows
        return dict(live_objects() - half)

    return asyncio.run(main())


def test_objects_do_not_grow_with_the_rows() -> None:
    grew = grown(2000)
    assert max(grew.values(), default=0) < 200, grew


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_objects_do_not_grow_with_a_hundred_thousand_rows() -> None:
    grew = grown(100_000)
    assert max(grew.values(), default=0) < 200, grew
