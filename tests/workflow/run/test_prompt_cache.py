"""Answers that a run has from an earlier one: only those that can only be so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.workflow.run.named_server import named_server
from weft import ops
from weft.abi.errors import EngineDead, StorageFailed
from weft.llm import LLM
from weft.workflow.actuals import CallCounts, CallUsage
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.prompt_cache import CallsInFlight, PromptCache

ROWS = [{"q": str(row)} for row in range(3)]
OPTIONS: dict[str, Any] = {"threads": 1, "num_pages": 128, "max_context": 256, "dtype": "float32"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", **OPTIONS) as made:
        yield made


def calls(flow: Any, llm: LLM, cache: Path, rows: Any = ROWS) -> tuple[CallCounts, list[Any]]:
    results = flow.run(rows, llm, cache=cache)
    assert results.errors == []
    return results.counts.calls, [result.outputs for result in results]


def asking(text: str, **fields: Any) -> Any:
    return weft.flow(lambda q: ops.llm(f"{text} {q}", max_tokens=4, **fields))


def test_only_what_changed_is_computed_again(llm: LLM, tmp_path: Path) -> None:
    def chain(last: str) -> Any:
        def flow(q: Any) -> Any:
            first = ops.llm(f"Say {q}", max_tokens=4, temperature=0)
            second = ops.llm([first.chat, ops.user("More.")], max_tokens=4, seed=4, temperature=1)
            return ops.llm(f"{second} {last}", max_tokens=4, temperature=0)

        return weft.flow(flow)

    before, expected = calls(chain("a"), llm, tmp_path)
    assert (before.calls, before.cached_calls) == (9, 0)
    again, same = calls(chain("a"), llm, tmp_path)
    assert (again.calls, again.cached_calls, again.prompt_tokens) == (0, 9, 0)
    assert same == expected
    changed, _ = calls(chain("b"), llm, tmp_path)
    assert (changed.calls, changed.cached_calls) == (3, 6)


def test_hits_are_row_by_row(llm: LLM, tmp_path: Path) -> None:
    calls(asking("Say", temperature=0), llm, tmp_path, ROWS[:2])
    assert calls(asking("Say", temperature=0), llm, tmp_path)[0][:3] == (1, 0, 2)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1}, {"temperature": 0, "cache": False}])
def test_what_is_never_kept(llm: LLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    for _ in range(2):
        assert calls(asking("Say", **fields), llm, tmp_path)[0].calls == 3


@pytest.mark.parametrize("fields", [{"temperature": 0, "stop": "x"}, {"temperature": 0, "min_p": 0.1}, {"seed": 1}])
def test_every_field_is_in_the_key(llm: LLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    calls(asking("Say", temperature=0), llm, tmp_path)
    assert calls(asking("Say", **fields), llm, tmp_path)[0].cached_calls == 0


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "float64"}, {"generation_config": "none"}, {"max_context": 128}, {"reasoning_parser": "none"}],
)
def test_with_another_precision_or_setting_it_is_another_model(
    llm: LLM, tmp_path: Path, changed: dict[str, Any]
) -> None:
    calls(asking("Say", temperature=0), llm, tmp_path)
    with LLM("weft-tiny", **OPTIONS | changed) as other:
        assert calls(asking("Say", temperature=0), other, tmp_path)[0].cached_calls == 0


def test_another_model_at_an_address_gives_its_own_answers(tmp_path: Path) -> None:
    flow = asking("Say", temperature=0)
    with named_server() as server:

        def answers(**options: Any) -> tuple[list[Any], int]:
            results = flow.run(ROWS, server.url, cache=tmp_path, **options)
            return results.column("value"), results.counts.calls.cached_calls

        def cached() -> Any:
            return flow.explain(ROWS, on=server.url, cache=tmp_path).to_dict()["prompt_cache"]["rows"]

        assert answers() == (["one says"] * 3, 0)
        assert server.num_listed == 1
        assert (answers(), cached()) == ((["one says"] * 3, 3), 3)
        assert answers(model="two") == (["two says"] * 3, 0)
        server.model = "three"
        assert cached() == 0
        assert answers() == (["three says"] * 3, 0)
        server.model = "one"
        assert answers() == (["one says"] * 3, 3)


def test_a_call_that_names_its_model_has_the_answers_of_that_name(tmp_path: Path) -> None:
    with named_server() as server:
        asking("Say", temperature=0, model="mine").run(ROWS, server.url, cache=tmp_path)
        server.model = "two"
        results = asking("Say", temperature=0, model="mine").run(ROWS, server.url, cache=tmp_path)
        assert (results.column("value"), results.counts.calls.cached_calls) == (["mine says"] * 3, 3)
        other = asking("Say", temperature=0, model="yours").run(ROWS, server.url, cache=tmp_path)
        assert other.counts.calls.cached_calls == 0


def test_without_a_known_model_no_answer_is_kept(tmp_path: Path) -> None:
    flow = asking("Say", temperature=0, retries=0)
    for _ in range(2):
        results = flow.run(ROWS, "http://127.0.0.1:9", cache=tmp_path)
        assert {error.kind for error in results.errors} == {"engine_dead"}


# ---- calls in flight


class Answers:
    """An `AnswerTable` whose writes end when the test says so."""

    def __init__(self) -> None:
        self.writes: list[Future[None]] = []
        self.is_closed = False

    def get(self, tenant: str, key: str, *, marks_use: bool) -> bytes | None:
        return None

    def put(self, tenant: str, key: str, answer: bytes) -> Future[None]:
        if self.is_closed:
            raise StorageFailed("closed")
        self.writes.append(Future())
        return self.writes[-1]


class Calls:
    """Calls of several runs, which end when the test says so."""

    def __init__(self) -> None:
        self.table = Answers()
        self.in_flight: CallsInFlight = {}
        self.made: list[asyncio.Future[ModelAnswer]] = []
        self.num_waiting = 0

    def cache(self, model: str = "model", tenant: str = "alice") -> PromptCache:
        return PromptCache(self.table, model, tenant, self.in_flight)  # type: ignore[arg-type]

    async def _make(self) -> ModelAnswer:
        self.made.append(asyncio.get_running_loop().create_future())
        return await self.made[-1]

    def _waits(self) -> None:
        self.num_waiting += 1

    def ask(self, cache: PromptCache | None = None) -> asyncio.Task[ModelAnswer]:
        return asyncio.ensure_future((cache or self.cache()).answer("key", self._make, self._waits))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  a condition of several objects
            await asyncio.sleep(0)

    def end(self, number: int) -> None:
        self.made[number].set_result(ModelAnswer(f"answer {number}", "stop", (), CallUsage(3, 0, 2)))


async def waiting(calls: Calls, others: int) -> list[asyncio.Task[ModelAnswer]]:
    first = calls.ask()
    await calls.until(lambda: len(calls.made) == 1)
    found = [first, *(calls.ask() for _ in range(others))]
    await calls.until(lambda: calls.num_waiting == others)
    return found


async def one_answer(calls: Calls) -> None:
    asked = await waiting(calls, 2)
    calls.end(0)
    answers = await asyncio.gather(*asked)
    assert [(each.text, each.is_cached) for each in answers] == [("answer 0", number > 0) for number in range(3)]
    assert answers[1].usage == CallUsage()
    later = await calls.ask()  # the database does not have it yet
    assert (later.text, later.is_cached, len(calls.made)) == ("answer 0", True, 1)


async def an_error(calls: Calls) -> None:
    asked = await waiting(calls, 2)
    calls.made[0].set_exception(EngineDead("it is gone"))
    with pytest.raises(EngineDead):
        await asked[0]
    await calls.until(lambda: len(calls.made) == 2 and calls.num_waiting == 3)
    calls.end(1)
    assert {(await each).text for each in asked[1:]} == {"answer 1"}


async def a_cancelled_run(calls: Calls) -> None:
    asked = await waiting(calls, 2)
    asked[0].cancel()
    await calls.until(lambda: len(calls.made) == 2 and calls.num_waiting == 3)
    assert asked[0].cancelled()
    calls.end(1)
    assert [(await each).text for each in asked[1:]] == ["answer 1", "answer 1"]


async def a_cancelled_waiter(calls: Calls) -> None:
    first, second = await waiting(calls, 1)
    second.cancel()
    await calls.until(second.done)
    calls.end(0)
    assert (await first).text == "answer 0"


async def others(calls: Calls) -> None:
    asked = [calls.ask(cache) for cache in (calls.cache(), calls.cache("another"), calls.cache(tenant="bob"))]
    await calls.until(lambda: len(calls.made) == 3)
    for number in range(3):
        calls.end(number)
    assert [each.is_cached for each in await asyncio.gather(*asked)] == [False] * 3


async def a_closed_database(calls: Calls) -> None:
    calls.table.is_closed = True
    (asked,) = await waiting(calls, 0)
    calls.end(0)
    assert (await asked).text == "answer 0"


@pytest.mark.parametrize("case", [one_answer, an_error, a_cancelled_run, a_cancelled_waiter, others, a_closed_database])
def test_equal_calls_in_flight_of_several_runs_are_made_once(case: Callable[[Calls], Awaitable[None]]) -> None:
    async def run() -> None:
        calls = Calls()
        await case(calls)
        for number, write in enumerate(calls.table.writes):
            write.set_result(None) if number else write.set_exception(StorageFailed("the disk is full"))
        await calls.until(lambda: not calls.in_flight)

    asyncio.run(run())
