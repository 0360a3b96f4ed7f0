"""A run's limit of seconds, in virtual time: what is in progress is cancelled, and every row ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.programs.virtual_time import run_virtually
from tests.workflow.run.player import fake_answer
from tests.workflow.run.test_driver import ASK, ROWS, InstantBackend, ManualBackend, collected, settled
from tests.workflow.shapes import Json, body, function, graph, llm, mapped
from weft.abi.errors import LimitExceeded, Overloaded
from weft.store.database import Database
from weft.store.workflow_runs import WorkflowRunTable
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.nodes import ExternalNode, LlmNode, TextNode
from weft.workflow.graph.templates import Reference
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.clock import KEPT_EVERY_S
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.instructions import CallModel, RowDone, RunLimits
from weft.workflow.run.journal import RunDescription, RunJournal
from weft.workflow.run.state import RunState
from weft.workflow.run.value_errors import NodeFailed
from weft.workflow.session.run import SessionRun

TEN = "the run has taken the 10 seconds that it may take"


def now() -> float:
    return asyncio.get_running_loop().time()


def driver(raw: Json, services: RunServices, seconds: float = 10, journal: RunJournal | None = None) -> Driver:
    state = RunState(graph_from_dict(raw), limits=RunLimits(seconds=seconds))
    return Driver(state, enumerate(ROWS[:3]), services, Concurrency(rows=2), journal)


def assert_out_of_time(done: RowDone, message: str = TEN) -> None:
    assert done.failure is not None
    assert isinstance(done.failure.error, LimitExceeded)
    assert (done.failure.error.message, done.failure.error.param) == (message, "seconds")
    assert done.outputs == {}


class SlowBackend(ManualBackend):
    """Answers row by row: row n after 4 (n + 1) seconds of the row's own."""

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        name = request.body["messages"][-1]["content"]
        self.asked.append(name)
        try:
            await asyncio.sleep(4 * (int(name) + 1))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return fake_answer(request)


def test_calls_in_progress_are_cancelled_and_rows_that_have_ended_keep_their_answers() -> None:
    async def main() -> None:
        backend = SlowBackend()
        done = await collected(driver(ASK, RunServices(backend)))
        # Row 2 begins when row 0 has ended, after 4 seconds, and would end after 16.
        assert (backend.asked, backend.num_cancelled) == (["0", "1", "2"], 1)
        assert [done[row].failure for row in (0, 1)] == [None, None]
        assert_out_of_time(done[2])
        assert done[2].failure.node == "a"  # type: ignore[union-attr]
        assert now() == 10
        assert len(asyncio.all_tasks()) == 1

    run_virtually(main())


def test_nothing_begins_after_the_time() -> None:
    async def main() -> None:
        backend = ManualBackend()
        done = await collected(driver(graph(llm("a", "{{q}}"), llm("b", "{{a}}")), RunServices(backend)))
        assert backend.asked == ["0", "1"], "row 2 arrives when the time has passed"
        assert backend.num_cancelled == 2
        for row in range(3):
            assert_out_of_time(done[row])

    run_virtually(main())


async def for_ever(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


async def unwilling(x: str) -> str:
    """A function that takes its cancellation for a result."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return x


PERSON = {"id": "f", "op": "external"}
PROGRAM = {"id": "f", "op": "program", "program": "agent"}


@pytest.mark.parametrize(
    "node",
    [
        PERSON,
        {**PERSON, "timeout_s": 1000.0},
        PROGRAM,
        function("f", "slow", x="{{q}}"),
        function("f", "unwilling", x="{{q}}"),
        mapped("f", "q", body(PERSON, v="f")),
    ],
    ids=["external", "timeout", "program", "function", "unwilling", "map"],
)
def test_every_wait_ends(node: Json) -> None:
    async def main() -> None:
        functions = {"slow": for_ever, "unwilling": unwilling}
        services = RunServices(InstantBackend(), functions, program=for_ever, external=for_ever)
        raw = graph(node, {"id": "after", "op": "list", "of": ["{{f}}"]})
        state = RunState(graph_from_dict(raw), limits=RunLimits(seconds=10))
        made = Driver(state, enumerate([{"q": ["one", "two"]}] * 3), services, Concurrency(rows=2))
        done = await collected(made)
        for row in range(3):
            assert_out_of_time(done[row])
        assert now() == 10
        assert len(asyncio.all_tasks()) == 1

    run_virtually(main())


def test_a_pause_between_two_tries_ends() -> None:
    class Full(ManualBackend):
        async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
            self.asked.append(request.body["messages"][-1]["content"])
            raise Overloaded("full", retry_after_s=3600.0)

    async def main() -> None:
        backend = Full()
        done = await collected(driver(ASK, RunServices(backend)))
        assert (backend.asked, now()) == (["0", "1"], 10)
        for row in range(3):
            assert_out_of_time(done[row])

    run_virtually(main())


def test_a_slow_reader_changes_nothing() -> None:
    async def main() -> None:
        backend = SlowBackend()
        made = Driver(
            RunState(graph_from_dict(ASK), limits=RunLimits(seconds=10)), enumerate(ROWS[:4]), RunServices(backend)
        )
        results = made.results()
        done = [await anext(results)]
        assert now() == 4
        await asyncio.sleep(100)
        assert (sorted(backend.asked), backend.num_cancelled) == (["0", "1", "2", "3"], 2)
        done += [each async for each in results]
        ended = {each.row: each for each in done if isinstance(each, RowDone)}
        assert [ended[row].failure for row in (0, 1)] == [None, None], "row 1 had its answer after 8 seconds"
        for row in (2, 3):
            assert_out_of_time(ended[row])

    run_virtually(main())


def test_an_error_that_ends_the_run_ends_it_when_the_time_has_passed_too() -> None:
    async def main() -> None:
        backend = SlowBackend()
        made = driver(ASK, RunServices(backend))
        results = made.results()
        await anext(results)

        def broken() -> None:
            raise OSError("the journal is gone")

        made._reports.put_nowait(broken)
        await asyncio.sleep(100)
        with pytest.raises(OSError, match="the journal is gone"):
            [each async for each in results]

    run_virtually(main())


def test_a_task_is_cancelled_once() -> None:
    """A second cancellation would interrupt what it does to end, such as to give back the pages of a sequence."""
    given_back: list[str] = []

    class Careful(ManualBackend):
        async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
            try:
                return await super().complete(request, started)
            finally:
                await asyncio.sleep(1)
                given_back.append(request.body["messages"][-1]["content"])

    async def main() -> None:
        await collected(driver(ASK, RunServices(Careful())))
        assert (sorted(given_back), now()) == (["0", "1"], 11)

    run_virtually(main())


def test_a_run_that_ends_in_time_leaves_no_timer() -> None:
    async def main() -> None:
        done = await collected(driver(ASK, RunServices(InstantBackend())))
        assert [row.failure for row in done.values()] == [None] * 3
        await asyncio.sleep(20)

    run_virtually(main())


# ---- over interruptions


def with_journal(folder: Path, work: Callable[[RunJournal], Coroutine[Any, Any, None]]) -> None:
    """Run something, in virtual time, as an execution of one and the same run. What it wrote is on the disk then."""
    with closing(Database(folder)) as database:
        run_virtually(work(RunJournal.open(database, "run", RunDescription("", "", ""))))


def kept_seconds(folder: Path) -> float:
    with closing(Database(folder)) as database:
        return WorkflowRunTable(database).seconds("run")


def test_the_used_time_is_that_of_all_executions(tmp_path: Path) -> None:
    async def interrupted(journal: RunJournal) -> None:
        running = asyncio.create_task(collected(driver(ASK, RunServices(SlowBackend()), journal=journal)))
        await asyncio.sleep(3.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def resumed(journal: RunJournal) -> None:
        backend = SlowBackend()
        done = await collected(driver(ASK, RunServices(backend), journal=journal))
        assert (now(), backend.num_cancelled) == (3.0, 2)
        for row in range(3):
            assert_out_of_time(done[row])

    async def too_late(journal: RunJournal) -> None:
        backend = ManualBackend()
        done = await collected(driver(ASK, RunServices(backend), journal=journal))
        assert (now(), backend.asked) == (0.0, [])
        for row in range(3):
            assert_out_of_time(done[row])

    for executions in (1, 2):
        with_journal(tmp_path, interrupted)
        assert kept_seconds(tmp_path) == 3.5 * executions
    with_journal(tmp_path, resumed)
    with_journal(tmp_path, too_late)


def test_a_kill_loses_less_than_a_second(tmp_path: Path) -> None:
    async def killed(journal: RunJournal) -> None:
        running = asyncio.create_task(collected(driver(ASK, RunServices(SlowBackend()), journal=journal)))
        await asyncio.sleep(2.5 * KEPT_EVERY_S)
        journal.keep_seconds = lambda seconds: None  # type: ignore[method-assign]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_journal(tmp_path, killed)
    assert kept_seconds(tmp_path) == 2 * KEPT_EVERY_S


# ---- the state, and sessions


def test_the_state_knows_time_as_an_argument() -> None:
    state = RunState(graph_from_dict(ASK), limits=RunLimits(seconds=1.5))
    state.go_on(state.counts.calls, 1.0)
    assert state.begin(100.0) == 100.5
    assert state.seconds(100.25) == 1.25
    state.open_row(0, {"q": "x"})
    (call,) = state.take(1)
    assert isinstance(call, CallModel), "a limit of seconds alone asks for no costs of calls"
    state.time_over()
    state.open_row(1, {"q": "y"})
    for done in state.take(5):
        assert isinstance(done, RowDone)
        assert_out_of_time(done, "the run has taken the 1.5 seconds that it may take")
    assert (state.num_rows, state.counts.failed_rows, state.has_next()) == (0, 2, False)


def test_a_session_is_out_of_time() -> None:
    async def main() -> None:
        backend = ManualBackend()
        session = SessionRun("s", RunServices(backend), limits=RunLimits(seconds=10))
        session.submit([ExternalNode(id="person"), *_nodes("a"), TextNode(id="t", template="{{person}}")])
        await settled()
        for name in ("person", "a", "t"):
            with pytest.raises(NodeFailed, match=TEN):
                await session.get(Reference(name))
        assert (backend.num_cancelled, now()) == (1, 10)
        session.submit(_nodes("b"))
        with pytest.raises(NodeFailed, match=TEN):
            await session.get(Reference("b"))
        assert backend.asked == ["Hi"]
        await session.close()

    run_virtually(main())


def _nodes(name: str) -> list[LlmNode]:
    (node,) = graph_from_dict(graph(llm(name))).nodes
    assert isinstance(node, LlmNode)
    return [node]
