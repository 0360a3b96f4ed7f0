"""The loop around a run: how much is in progress at once, and what happens to it in the end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.workflow.run.player import fake_answer
from tests.workflow.shapes import Json, function, graph, llm, text
from weft.abi.errors import Overloaded, Unsupported
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow import api
from weft.workflow.actuals import CallCounts, RunCounts
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.values import PartRanges
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.functions import MAX_VALUE_BYTES
from weft.workflow.run.instructions import CallModel, FindCost, RowDone, RunLimits
from weft.workflow.run.row_reader import RowReader
from weft.workflow.run.state import RunState


class ManualBackend:
    """Answers when a test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.started: dict[str, Callable[[], None]] = {}
        self.answers: dict[str, asyncio.Future[ModelAnswer]] = {}
        self.num_cancelled = 0

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        name = request.body["messages"][-1]["content"]
        self.asked.append(name)
        self.started[name] = started
        self.answers[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.answers[name]
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        return [text[start:end] for start, end in ranges(range(len(text) + 1), lambda at: True)]

    def answer(self, name: str) -> None:
        self.answers[name].set_result(fake_answer(ModelRequest("/v1/chat/completions", {"messages": [name]})))


class InstantBackend(ManualBackend):
    """Answers at once."""

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        self.asked.append(request.body["messages"][-1]["content"])
        return fake_answer(request)


def driver(raw: Json, given: Iterator[Json] | list[Json], services: RunServices, **at_once: int) -> Driver:
    return Driver(RunState(graph_from_dict(raw)), enumerate(given), services, Concurrency(**at_once))


async def collected(made: Driver) -> dict[int, RowDone]:
    return {done.row: done async for done in made.results()}


def run(raw: Json, rows: list[Json], services: RunServices | None = None, **at_once: int) -> dict[int, RowDone]:
    return asyncio.run(collected(driver(raw, rows, services or RunServices(InstantBackend()), **at_once)))


async def settled() -> None:
    """Let everything happen that needs no further event."""
    for _ in range(20):
        await asyncio.sleep(0)


ASK = graph(llm("a", "{{q}}"))
ROWS = [{"q": str(row)} for row in range(9)]


def test_few_calls_wait_and_they_are_the_first_ones() -> None:
    async def main() -> None:
        backend = ManualBackend()
        running = asyncio.create_task(collected(driver(ASK, ROWS, RunServices(backend), calls=4, waiting_calls=2)))
        await settled()
        assert backend.asked == ["0", "1"]
        backend.started["1"]()
        await settled()
        assert backend.asked == ["0", "1", "2"]
        backend.started["0"]()
        backend.started["2"]()
        await settled()
        assert backend.asked == ["0", "1", "2", "3"], "four calls at once"
        backend.answer("2")
        await settled()
        assert backend.asked == ["0", "1", "2", "3", "4"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert backend.num_cancelled == 4

    asyncio.run(main())


def test_calls_that_go_on_with_a_conversation_do_not_wait_behind_those_that_begin_one() -> None:
    again = {"id": "again", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "again {{q}}"}]}
    chats = graph(llm("a", "{{q}}"), again, llm("end", "end {{again}}"))

    async def main() -> None:
        backend = ManualBackend()
        running = asyncio.create_task(collected(driver(chats, ROWS, RunServices(backend), calls=5, waiting_calls=2)))
        await settled()
        for name in ("0", "1"):
            backend.started[name]()
        await settled()
        assert backend.asked == ["0", "1", "2", "3"], "two wait for the engine"
        backend.answer("1")
        backend.answer("0")
        await settled()
        assert backend.asked[4:] == ["again 0", "again 1"], "in order, though two wait"
        backend.started["2"]()
        await settled()
        assert len(backend.asked) == 6, "three wait"
        backend.answer("again 0")
        backend.started["again 1"]()
        await settled()
        assert backend.asked[6].startswith("end "), "as few wait as may"
        assert len(backend.asked) == 7
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_no_more_calls_are_in_progress_however_many_go_on() -> None:
    again = {"id": "b", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "b {{q}}"}]}
    more = {"id": "c", "op": "llm", "messages": [{"chat": "a"}, {"role": "user", "content": "c {{q}}"}]}

    async def main() -> None:
        backend = ManualBackend()
        chats = graph(llm("a", "{{q}}"), again, more, outputs={"b": "b", "c": "c"})
        running = asyncio.create_task(collected(driver(chats, ROWS, RunServices(backend), calls=3, waiting_calls=1)))
        await settled()
        for name in ("0", "1"):
            backend.started[name]()
            await settled()
        backend.answer("0")
        backend.answer("1")
        await settled()
        assert backend.asked == ["0", "1", "2", "b 0", "c 0"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_rows_are_read_as_they_are_needed() -> None:
    async def main() -> None:
        read = []

        def each() -> Iterator[Json]:
            for row in ROWS:
                read.append(row)
                yield row

        backend = ManualBackend()
        running = asyncio.create_task(collected(driver(ASK, each(), RunServices(backend), rows=3)))
        await settled()
        assert len(read) == 3
        backend.answer("1")
        await settled()
        assert len(read) == 4
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


# ---- iterators that take long


MOMENT_S = 30
"""After which a test fails that would otherwise never end."""


def test_an_iterator_that_waits_for_a_result_has_it() -> None:
    """Its first row ends while the second one is not there."""
    has_ended = threading.Event()
    threads: list[threading.Thread] = []

    def each() -> Iterator[Json]:
        for row in ROWS[:3]:
            threads.append(threading.current_thread())
            yield row
            assert has_ended.wait(MOMENT_S)

    raw = graph(llm("a", "{{q}}"), llm("b", "{{a}}"))
    with LLM.over(FakeEngine, byte_tokenizer()) as model:
        results = api.stream(graph_from_dict(raw), each(), model)
        numbers = [next(results).row]
        has_ended.set()
        numbers += [result.row for result in results]
    assert (numbers[0], sorted(numbers)) == (0, [0, 1, 2])
    assert len(set(threads)) == 1, "a cursor may belong to its thread"


def test_results_of_one_run_are_the_rows_of_another_on_the_same_model() -> None:
    raw = graph_from_dict(graph(llm("a", "{{q}}")))
    with LLM.over(FakeEngine, byte_tokenizer()) as model:
        rows = ({"q": result.outputs["out"]} for result in api.stream(raw, ROWS, model))  # type: ignore[union-attr]
        assert len(api.run(raw, rows, model).column("out")) == len(ROWS)


def test_what_an_iterator_raises_ends_the_run() -> None:
    def each() -> Iterator[Json]:
        yield from ROWS[:2]
        raise OSError("the file is gone")

    with (
        LLM.over(FakeEngine, byte_tokenizer()) as model,
        pytest.raises(OSError, match="the file is gone"),
    ):
        api.run(graph_from_dict(ASK), each(), model)


def test_a_run_that_is_left_reads_no_further_row() -> None:
    async def main() -> None:
        is_asked, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

        def each() -> Iterator[tuple[int, Json]]:
            try:
                yield 0, ROWS[0]
                is_asked.set()
                assert may_end.wait(MOMENT_S)
                yield 1, ROWS[1]
                raise AssertionError("nothing takes this row")
            finally:
                has_ended.set()

        reader = RowReader(each())
        results = Driver(RunState(graph_from_dict(ASK)), reader, RunServices(InstantBackend())).results()
        assert isinstance(await anext(results), RowDone)
        assert await asyncio.to_thread(is_asked.wait, MOMENT_S)
        await results.aclose()
        may_end.set()
        del reader, results
        assert await asyncio.to_thread(has_ended.wait, MOMENT_S)

    asyncio.run(main())


def test_an_iterator_is_read_as_its_rows_are_needed() -> None:
    ahead: list[int] = []
    ended: list[int] = []

    def each() -> Iterator[tuple[int, Json]]:
        for number, row in enumerate(ROWS):
            ahead.append(number + 1 - len(ended))
            yield number, row

    async def main() -> None:
        state = RunState(graph_from_dict(ASK))
        made = Driver(state, RowReader(each()), RunServices(InstantBackend()), Concurrency(rows=3))
        async for done in made.results():
            assert isinstance(done, RowDone)
            ended.append(done.row)

    asyncio.run(main())
    assert sorted(ended) == list(range(9))
    assert max(ahead) <= 2 * 3, "three in progress, and three whose results are not taken"


def test_leaving_early_cancels_what_is_in_progress() -> None:
    async def main() -> None:
        backend = ManualBackend()
        results = driver(ASK, ROWS, RunServices(backend)).results()
        first = asyncio.ensure_future(anext(results))
        await settled()
        backend.answer("4")
        assert (await first).row == 4
        await results.aclose()
        assert backend.num_cancelled == 8

    asyncio.run(main())


def test_an_overload_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workflow.run.state.FIRST_PAUSE_S", 0.0)

    class FullOnce(InstantBackend):
        async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
            if len(self.asked) == 0:
                self.asked.append("")
                raise Overloaded("full", retry_after_s=0.001)
            return await super().complete(request, started)

    backend = FullOnce()
    done = run(ASK, ROWS, RunServices(backend))
    assert [row.failure for row in done.values()] == [None] * 9
    assert len(backend.asked) == 10


def calling(name: str, called: Callable[..., Any], **services: Any) -> RowDone:
    made = RunServices(InstantBackend(), {name: called}, **services)
    return run(graph(function("f", name, x="{{q}}")), [{"q": "it"}], made)[0]


def test_functions_run_beside_the_loop_and_coroutines_on_it() -> None:
    threads = []

    def plain(x: str) -> list[str]:
        threads.append(threading.current_thread())
        return [x]

    async def coroutine(x: str) -> list[str]:
        threads.append(threading.current_thread())
        return [x]

    assert calling("f", plain).outputs == calling("f", coroutine).outputs == {"out": ["it"]}
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


@pytest.mark.parametrize(
    ("called", "message"),
    [
        (lambda x: {}[x], "'it'"),
        (lambda x: object(), "a value of builtins.object is not JSON"),
        (lambda x: {1j}, "a value of builtins.set is not JSON"),
        (lambda x: "." * MAX_VALUE_BYTES, "16 MiB"),
        (lambda: 1, "unexpected keyword argument"),
    ],
)
def test_a_function_that_fails_fails_its_row(called: Callable[..., Any], message: str) -> None:
    failure = calling("f", called).failure
    assert failure is not None
    assert failure.node == "f"
    assert message in str(failure.error)


def test_a_function_that_never_returns_is_given_up() -> None:
    async def endless(x: str) -> None:
        await asyncio.Event().wait()

    failure = calling("f", endless, function_timeout_s=0.01).failure
    assert failure is not None
    assert str(failure.error) == "f did not return within 0.01 s"


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (function("f", "other", x="1"), "other"),
        ({"id": "f", "op": "function", "source": "async def main(args): pass"}, "source"),
        ({"id": "f", "op": "program", "program": "agent"}, "agent"),
        ({"id": "f", "op": "external"}, "f"),
    ],
)
def test_what_is_not_here_is_an_error_that_names_it(node: Json, names: str) -> None:
    failure = run(graph(node), [{"q": ""}])[0].failure
    assert failure is not None
    assert isinstance(failure.error, Unsupported)
    assert names in str(failure.error)


def test_values_from_outside() -> None:
    async def external(instruction: Any) -> Any:
        if instruction.task.row == 1:
            await asyncio.Event().wait()
        return {"row": instruction.task.row}

    raw = graph({"id": "person", "op": "external", "timeout_s": 0.01})
    done = run(raw, ROWS[:2], RunServices(InstantBackend(), external=external))
    assert done[0].outputs == {"out": {"row": 0}}
    assert done[1].failure is not None
    assert str(done[1].failure.error) == "no value came within 0.01 s"


def test_texts_are_split_by_the_model_s_tokens() -> None:
    parts = function("s", "split", text="{{q}}", max_tokens=3, overlap_tokens=1)
    assert run(graph(parts), [{"q": "abcdefg"}])[0].outputs == {"out": ["abc", "cde", "efg"]}
    failure = run(graph({**parts, "args": {"text": "{{q}}", "max_tokens": "{{q}}"}}), [{"q": "x"}])[0].failure
    assert failure is not None
    assert "not an integer" in str(failure.error)


def test_rows_come_from_what_waits_for_them_too() -> None:
    async def main() -> None:
        async def rows() -> AsyncIterator[tuple[int, Json]]:
            for number in (7, 3):
                await asyncio.sleep(0)
                yield number, {"q": str(number)}

        made = Driver(RunState(graph_from_dict(ASK)), rows(), RunServices(InstantBackend()))
        assert sorted(await collected(made)) == [3, 7]

    asyncio.run(main())


def test_others_have_a_turn_while_large_rows_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workflow.run.bounds.TURN_COST", 2)
    turns: list[int] = []

    async def main() -> None:
        async def other() -> None:
            while True:
                turns.append(made._state.num_rows)
                await asyncio.sleep(0)

        made = driver(ASK, ROWS, RunServices(ManualBackend()))
        running, beside = asyncio.create_task(collected(made)), asyncio.create_task(other())
        await settled()
        for task in (running, beside):
            task.cancel()
        await asyncio.gather(running, beside, return_exceptions=True)

    asyncio.run(main())
    assert set(range(2, 9, 2)) <= set(turns)


def test_a_run_that_goes_on_counts_from_the_rows_that_have_ended() -> None:
    before = RunCounts(2, 1, CallCounts(calls=3, prompt_tokens=10), {"a": CallCounts(calls=3)})
    state = RunState(graph_from_dict(ASK), limits=RunLimits(calls=4), counts=before)
    state.open_row(5, {"q": "x"})
    state.open_row(6, {"q": "y"})
    for each in state.take(2):
        assert isinstance(each, FindCost)
        state.counted(each.task, None)
    failed, call = [*state.take(2), *state.take(2)]
    assert isinstance(failed, RowDone)
    assert isinstance(call, CallModel)
    answer = fake_answer(call.request)
    state.answered(call.task, answer)
    assert state.counts.calls == before.calls.plus(answer.usage, is_cached=False)
    assert state.counts.by_node == {"a": before.by_node["a"].plus(answer.usage, is_cached=False)}
    assert (state.counts.rows, state.counts.failed_rows) == (4, 2)
    assert (failed.row, "4 calls" in str(failed.failure)) == (6, True)
    assert [each.failure for each in state.take(0) if isinstance(each, RowDone)] == [None]


def test_counts_of_a_row_come_with_its_end() -> None:
    state = RunState(graph_from_dict(graph(llm("a", "{{q}}", seed=1), llm("b", "{{a}}", seed=1))))
    for row in range(2):
        state.open_row(row, {"q": "same"})
    (call,) = state.take(5)
    assert isinstance(call, CallModel)
    state.answered(call.task, fake_answer(call.request))
    assert (state.counts.calls.calls, state.counts.calls.merged_calls) == (1, 1)
    (call,) = state.take(5)
    assert isinstance(call, CallModel)
    state.answered(call.task, fake_answer(call.request))
    ended = [each.by_node for each in state.take(0) if isinstance(each, RowDone)]
    counts = [{name: (each.calls, each.merged_calls) for name, each in row.items()} for row in ended]
    assert counts == [{"a": (1, 0), "b": (1, 0)}, {"a": (0, 1), "b": (0, 1)}]
    assert {name: (each.calls, each.merged_calls) for name, each in state.counts.by_node.items()} == {
        "a": (1, 1),
        "b": (1, 1),
    }


def doubling(levels: int, node: Callable[[str, str], Json]) -> Json:
    """A graph of nodes each of which has the one before it twice."""
    names = ["q", *(f"n{number}" for number in range(levels))]
    return graph(*(node(name, before) for before, name in itertools.pairwise(names)))


def test_no_other_call_answers_one_that_may_not_be_cached() -> None:
    raw = graph(
        *(llm(name, "{{q}}", temperature=0, cache=name == "a") for name in "abc"), outputs={n: n for n in "abc"}
    )
    backend = InstantBackend()
    run(raw, [{"q": "x"}], RunServices(backend))
    assert len(backend.asked) == 3


@pytest.mark.parametrize(
    "node",
    [
        lambda name, before: text(name, f"{{{{{before}}}}}{{{{{before}}}}}"),
        lambda name, before: {"id": name, "op": "list", "of": [f"{{{{{before}}}}}", f"{{{{{before}}}}}"]},
        lambda name, before: function(name, "join", of=[f"{{{{{before}}}}}", f"{{{{{before}}}}}"], separator=","),
    ],
    ids=["text", "list", "join"],
)
def test_values_that_double_fail_their_row(node: Callable[[str, str], Json], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workflow.graph.values.MAX_VALUE_CHARS", 1000)
    done = run(doubling(200, node), [{"q": "x" * 100}, {"q": "y"}])
    for row in done.values():
        assert row.failure is not None
        assert "Mi characters as text" in str(row.failure.error)
    assert done[0].failure.node in ("n3", "n4")
    short = run(doubling(2, node), [{"q": "x" * 100}])
    assert short[0].failure is None


@pytest.mark.parametrize(
    "node",
    [
        {"id": "n", "op": "list", "of": [f"{number}{{{{q}}}}" for number in range(20)]},
        function("n", "given", **{f"a{number}": f"{number}{{{{q}}}}" for number in range(20)}),
        {"id": "n", "op": "llm", "messages": [{"role": "user", "content": f"{n}{{{{q}}}}"} for n in range(20)]},
    ],
    ids=["list", "arguments", "messages"],
)
def test_the_texts_of_a_node_are_bounded_together(node: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workflow.graph.values.MAX_VALUE_CHARS", 1000)
    failure = run(graph(node), [{"q": "x" * 100}])[0].failure
    assert failure is not None
    assert "Mi characters as text" in str(failure.error)
    assert failure.error.__traceback__ is None  # it would hold the texts


def test_a_function_that_spins_fails_its_row_and_holds_nothing_up() -> None:
    """Its thread goes on: nothing can end it but the function."""
    may_end, has_ended = threading.Event(), threading.Event()

    def spin(x: str) -> str:
        may_end.wait()
        has_ended.set()
        return x

    with LLM.over(FakeEngine, byte_tokenizer()) as model:
        spins = api.run(
            graph_from_dict(graph(function("f", "f", x="{{q}}"))),
            [{"q": "it"}],
            model,
            functions={"f": spin},
            function_timeout_s=0.01,
        )
    assert "f did not return within 0.01 s" in str(spins.errors)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait()


def test_an_answer_to_other_tokens_is_not_the_answer() -> None:
    """As where a chat template writes the date."""
    kept: dict[str, ModelAnswer] = {}

    class Kept:
        async def answer(self, key: str, make: Any, waits: Any) -> ModelAnswer:
            if key not in kept:
                kept[key] = await make()
            return kept[key]

    class DatedBackend(InstantBackend):
        day = "Monday"

        async def prompt_digest(self, request: ModelRequest) -> str:
            return self.day

    backend = DatedBackend()
    services = RunServices(backend, cache=Kept())  # type: ignore[arg-type]
    raw = graph(llm("a", "{{q}}", temperature=0))
    for day, num_asked in [("Monday", 1), ("Monday", 1), ("Tuesday", 2), ("Monday", 2)]:
        backend.day = day
        run(raw, [{"q": "it"}], services)
        assert len(backend.asked) == num_asked
