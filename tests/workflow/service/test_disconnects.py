"""What a client that disconnects, or asks twice at once, leaves behind in the service of workflows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import ASK, PLAIN, ROWS, assert_nothing_left, create, events, start
from tests.workflow.shapes import Json, graph, text
from weft.abi.errors import NoValue
from weft.workflow.service import run_variables
from weft.workflow.service.record import WorkflowRunSpec
from weft.workflow.service.run_variables import VariableAnswer, WaitingVariables
from weft.workflow.service.runs import RunRequested

T = TypeVar("T")
TWO = graph({"id": "a", "op": "external"}, {"id": "b", "op": "external"}, text("t", "{{a}} {{b}}"))


class Held:
    """Stands for a blocking function: its first call stops before or after its work, until it is let go."""

    def __init__(self, work: Callable[..., Any], *, after: bool = False):
        self.began, self.go = threading.Event(), threading.Event()
        self._work, self._after = work, after

    def __call__(self, *args: Any) -> Any:
        is_first = not self.began.is_set()
        result = self._work(*args) if self._after else None
        if is_first:
            self.began.set()
            assert self.go.wait(60)
        return result if self._after else self._work(*args)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.began.wait, 60)


def run_on(server: RunningServer, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, server.server.loop).result(60)


def waiting_ids(server: RunningServer, count: int) -> list[str]:
    """The variables that runs wait for, in the order of their nodes."""
    known = server.service.workflows.variables.by_id
    server.wait_until(lambda: len(known) == count)
    return [wait.wait.id for wait in sorted(known.values(), key=lambda each: (each.wait.row, each.wait.node))]


def test_a_run_is_resumed_although_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(auto=False) as stepped, stepped.http() as client:
        run = start(client, ASK, background=True)["id"]
        client.post(f"/v1/runs/{run}/cancel")
        runs = stepped.service.workflows.runs
        held = Held(runs._tables.runs.reopen)
        monkeypatch.setattr(runs._tables.runs, "reopen", held)

        async def disconnect() -> None:
            request = asyncio.create_task(runs.resume("", run))
            await held.has_begun()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

        run_on(stepped, disconnect())
        held.go.set()
        stepped.wait_until(lambda: len(stepped.engine.sequences) == 5)
        client.post(f"/v1/runs/{run}/cancel")
        assert_nothing_left(stepped)


def test_a_run_does_not_go_on_with_a_workflow_whose_nodes_have_other_ids() -> None:
    """Values from outside are kept by ids, and these would be those of the other node."""

    def asked(first: str, second: str) -> Json:
        nodes = ({"id": first, "op": "external"}, {"id": second, "op": "external"})
        return graph(*nodes, text("t", f"{{{{{first}}}}} then {{{{{second}}}}}"))

    with running() as server, server.http() as client:
        run = start(client, asked("a", "b"), ROWS[:1], background=True)["id"]
        waiting_ids(server, 2)
        client.post(f"/v1/runs/{run}/cancel")
        server.wait_until(lambda: not server.service.workflows.runs.num_running)
        workflow = create(client, asked("a", "b"))
        client.delete(f"/v1/workflows/{workflow}")
        assert create(client, asked("b", "a")) == workflow
        client.post(f"/v1/runs/{run}/resume")
        ended = events(client.get(f"/v1/runs/{run}/events").text)[-1][1]["run"]
        assert ended["status"] == "failed"
        assert "stored again with other ids" in ended["error"]["message"]
        client.delete(f"/v1/workflows/{workflow}")
        assert create(client, asked("a", "b")) == workflow
        client.post(f"/v1/runs/{run}/resume")
        assert len(waiting_ids(server, 2)) == 2
        client.post(f"/v1/runs/{run}/cancel")
        assert_nothing_left(server)


def test_two_requests_with_one_key_wait_for_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.http() as client:
        start(client, PLAIN)
        runs, library = server.service.workflows.runs, server.service.workflows.library
        held = Held(runs._tables.runs.begin, after=True)
        monkeypatch.setattr(runs._tables.runs, "begin", held)

        async def both() -> None:
            (workflow,) = await library.all("")
            workflow = await library.find("", workflow.id)
            asked = RunRequested(WorkflowRunSpec(), ROWS, "key")
            first = asyncio.create_task(runs.start("", workflow, asked))
            await held.has_begun()
            # The record of the first one is stored; this server does not carry the run out yet.
            second = await runs.start("", workflow, asked)
            assert await runs.here(second) is second
            held.go.set()
            assert await first is second
            assert (await second.wait()).status == "finished"

        run_on(server, both())
        assert_nothing_left(server)


def test_a_variable_is_set_although_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.http() as client:
        run = start(client, TWO, ROWS[:1], background=True)["id"]
        first, second = waiting_ids(server, 2)
        variables = server.service.workflows.variables
        held = Held(variables.table.set)
        monkeypatch.setattr(variables.table, "set", held)

        async def disconnect() -> None:
            request = asyncio.create_task(variables.set("", first, VariableAnswer(value="x")))
            await held.has_begun()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

        run_on(server, disconnect())
        held.go.set()
        run_on(server, variables.set("", second, VariableAnswer(value="y")))
        client.get(f"/v1/runs/{run}/events")
        assert client.get(f"/v1/runs/{run}/results").json()["data"][0]["outputs"] == {"out": "x y"}
        assert_nothing_left(server)


def test_a_value_that_comes_after_its_run_has_ended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.http() as client:
        run = start(client, TWO, ROWS[:1], background=True)["id"]
        first, _ = waiting_ids(server, 2)
        held = Held(run_variables._encoded)
        monkeypatch.setattr(run_variables, "_encoded", held)
        variables = server.service.workflows.variables

        async def late(variables: WaitingVariables) -> None:
            request = asyncio.create_task(variables.set("", first, VariableAnswer(value="x")))
            await held.has_begun()
            server.service.workflows.runs._live[run].cancel()
            while variables.by_id:  # noqa: ASYNC110  the end of the run has no event here
                await asyncio.sleep(0)
            held.go.set()
            with pytest.raises(NoValue):
                await request

        run_on(server, late(variables))
        assert_nothing_left(server)


def test_rows_that_have_ended_leave_nothing_of_their_variables() -> None:
    with running() as server, server.http() as client:
        run = start(client, TWO, ROWS[:2], background=True)["id"]
        *first_row, third, fourth = waiting_ids(server, 4)
        variables = server.service.workflows.variables
        owner = variables.by_id[third].owner
        for id in first_row:
            run_on(server, variables.set("", id, VariableAnswer(value="x")))
        server.wait_until(lambda: server.service.workflows.runs._live[run].record.counts.rows == 1)
        assert server.on_loop(lambda: list(owner._attempts)) == [1]
        for id in (third, fourth):
            run_on(server, variables.set("", id, VariableAnswer(value="y")))
        client.get(f"/v1/runs/{run}/events")
        assert_nothing_left(server)
