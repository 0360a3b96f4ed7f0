"""Workflows from Python on a server of ours: the graph runs there, functions of Python here."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import assert_nothing_left
from weft import ops
from weft.abi.errors import ConfigError, LimitExceeded, Unsupported, WeftError
from weft.client import Client, ServerError
from weft.workflow import remote
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.planning import RunPlanner
from weft.workflow.run.value_errors import NodeFailed

ROWS = [{"topic": f"topic {number}"} for number in range(6)]
THREADS: set[str] = set()


def shout(text: str) -> str:
    THREADS.add(threading.current_thread().name)
    return text.upper()


async def whisper(text: str) -> str:
    await asyncio.sleep(0)
    return text.lower()


def broken(text: str) -> str:
    raise KeyError(text)


@weft.flow
def tell(topic: Any) -> Any:
    first = ops.llm(f"Tell me about {topic}.", max_tokens=3, temperature=0)
    return {"text": first, "loud": ops.function(shout, topic), "low": ops.function(whisper, topic)}


class Through:
    """A server whose calls go to a client."""

    def __init__(self, client: Client):
        self._client = client

    def workflow_server(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client.workflows, name)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def client(shared: RunningServer) -> Iterator[Client]:
    with Client(shared.url) as client:
        yield client
    assert_nothing_left(shared)


def test_the_graph_runs_there_and_functions_here(shared: RunningServer, client: Client) -> None:
    results = tell.run(ROWS, on=client)
    local = tell.run(ROWS, on=f"{shared.url}/v1")
    assert [result.outputs for result in results] == [result.outputs for result in local]
    assert results[2]["loud"] == "TOPIC 2"
    assert results.errors == []
    assert results.counts.calls.calls + results.counts.calls.cached_calls == 6
    assert set(results.counts.by_node) == set(local.counts.by_node)
    assert (results.counts.rows, results.counts.failed_rows) == (6, 0)
    assert THREADS
    run = client.runs.list()[0]
    assert run.workflow is not None
    assert (run.status, run.workflow["rows"], run.hash) == ("finished", 6, tell.digest)
    assert run.program == "tell", "the name of the flow"


def test_errors_are_those_of_a_local_run(shared: RunningServer, client: Client) -> None:
    flow = weft.flow(lambda topic: {"bad": ops.function(broken, topic), "good": ops.text(f"{topic}!")})
    remote, local = flow.run(ROWS[:2], on=client), flow.run(ROWS[:2], on=f"{shared.url}/v1")
    assert remote.errors == local.errors
    assert remote.errors[0].kind == "KeyError"
    assert [result.outputs for result in remote] == [result.outputs for result in local]


class Wordless(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


def wordless(text: str) -> str:
    raise Wordless


def verbose(text: str) -> str:
    raise ValueError("x" * (20 << 20))


def named_at_length(text: str) -> str:
    raise type("É" * 500, (Exception,), {})("m")


@pytest.mark.parametrize("function", [wordless, verbose, named_at_length])
def test_errors_that_cannot_be_told_as_they_are_fail_their_row(
    shared: RunningServer, client: Client, function: Any
) -> None:
    flow = weft.flow(lambda topic: {"bad": ops.function(function, topic), "good": ops.text(f"{topic}!")})
    there, here = flow.run(ROWS[:2], on=client), flow.run(ROWS[:2], on=f"{shared.url}/v1")
    assert there.errors == here.errors
    assert len(there.errors) == 2
    assert len(there.errors[0].kind) <= 100
    assert 0 < len(there.errors[0].message) <= 1 << 16


def test_a_value_that_the_server_refuses_fails_its_row(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    send = client.workflows.set_variable

    def refuse(variable_id: str, value: Any = None, **given: Any) -> None:
        if not given:
            raise ServerError(413, "too large")
        send(variable_id, **given)

    monkeypatch.setattr(client.workflows, "set_variable", refuse)
    error = weft.flow(lambda topic: ops.function(shout, topic)).run(ROWS[:1], on=client).errors[0]
    assert "too large" in error.message
    monkeypatch.setattr(client.workflows, "set_variable", lambda *args, **given: refuse(""))
    with pytest.raises(ServerError, match="too large"):  # nor can it be told why
        weft.flow(lambda topic: ops.function(shout, topic)).run(ROWS[:1], on=client)


NAMES = "latency, ttft, throughput, deadline, batch"


@pytest.mark.parametrize("objective", ["fast", {"text": "fast"}])
def test_an_objective_that_does_not_exist_is_refused_with_those_that_do(
    shared: RunningServer, client: Client, objective: Any
) -> None:
    for on in (client, shared.url):
        with pytest.raises(WeftError, match=f"objective.*'fast'.*; there are {NAMES}"):
            tell.run(ROWS[:1], on=on, objective=objective)


def test_values_from_outside(client: Client) -> None:
    async def external(asked: Any) -> Any:
        return {"row": asked.task.row, "node": asked.node.id}

    flow = weft.flow(lambda topic: {"v": ops.external(schema={"type": "object"})})
    results = flow.run(ROWS[:3], on=client, external=external)
    assert [result["v"]["row"] for result in results] == [0, 1, 2]

    def plain(asked: Any) -> Any:
        return {"row": asked.task.row}

    assert flow.run(ROWS[:1], on=client, external=plain)[0]["v"] == {"row": 0}

    async def wrong(asked: Any) -> Any:
        return "a text"

    error = flow.run(ROWS[:1], on=client, external=wrong).errors[0]
    assert "does not follow its schema" in error.message


def test_a_value_is_sent_until_the_server_has_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the server has no room for it, is starting, or cannot be reached."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    send, refusals = client.workflows.set_variable, []

    def refuse(variable_id: str, *args: Any, **given: Any) -> None:
        refusals.append(variable_id)
        if len(refusals) < 40:
            status = (429, 503, 507, None)[len(refusals) % 4]
            raise WeftError("not now") if status is None else ServerError(status, "not now")
        send(variable_id, *args, **given)

    monkeypatch.setattr(client.workflows, "set_variable", refuse)
    loud = weft.flow(lambda topic: ops.function(shout, topic))
    assert loud.run(ROWS[:1], on=client).column("value") == ["TOPIC 0"]
    assert refusals == 40 * [refusals[0]]


def test_a_value_that_cannot_be_sent_ends_the_run(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **given: Any) -> None:
        raise TypeError("a fault of the client")

    monkeypatch.setattr(client.workflows, "set_variable", fail)
    with pytest.raises(TypeError, match="a fault of the client"):
        weft.flow(lambda topic: ops.function(shout, topic)).run(ROWS[:1], on=client)


def test_a_function_that_takes_too_long(client: Client) -> None:
    async def endless(text: str) -> None:
        await asyncio.Event().wait()

    flow = weft.flow(lambda topic: ops.function(endless, topic))
    error = flow.run(ROWS[:1], on=client, function_timeout_s=0.01).errors[0]
    assert error.message == "endless did not return within 0.01 s"


def leaves(text: str) -> None:
    sys.exit("no configuration")


async def leaves_on_the_loop(text: str) -> None:
    sys.exit("no configuration")


async def ends_cancelled(text: str) -> None:
    raise asyncio.CancelledError


def test_functions_that_end_their_loop_fail_their_row(shared: RunningServer, client: Client) -> None:
    for called, named in ((leaves, "SystemExit"), (leaves_on_the_loop, "SystemExit"), (ends_cancelled, "Cancelled")):
        flow = weft.flow(lambda topic, called=called: ops.function(called, topic))
        for on in (client, shared.url):
            (error,) = flow.run(ROWS[:1], on=on, function_timeout_s=60).errors
            assert f"{called.__name__} raised {named}" in error.message
        native = weft.native_function(called)
        with weft.session(on=shared.url, function_timeout_s=60):
            with pytest.raises(NodeFailed, match=named):
                native("x").get(timeout_s=60)
            assert ops.text("there").get(timeout_s=60) == "there"


def test_two_runs_do_not_write_the_same_results(client: Client, tmp_path: Path) -> None:
    refused: list[ConfigError] = []

    def again(text: str) -> str:
        with pytest.raises(ConfigError) as caught:
            nested.run(ROWS[:1], on=client, out=tmp_path / "out.jsonl")
        refused.append(caught.value)
        return text

    nested = weft.flow(lambda topic: ops.function(again, topic))
    assert not nested.run(ROWS[:1], on=client, out=tmp_path / "out.jsonl").errors
    assert "another run holds" in refused[0].message


def test_limits_and_fields_go_along(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"topic": f"a limit, {number}"} for number in range(6)]  # of which the prompt cache has no answers
    results = tell.run(rows, on=client, limits=RunLimits(calls=2), optimise=False)
    assert {error.kind for error in results.errors} == {LimitExceeded.kind}
    assert results.counts.calls.calls == 2
    for name, value in (("cache", "x"), ("api_key", "k")):
        with pytest.raises(Unsupported, match=name):
            tell.run(ROWS, on=client, **{name: value})
    first = tell.run(rows[:1], on=client)  # the prompt cache has its answers now
    sent: list[dict[str, Any]] = []
    start = client.workflows.start
    monkeypatch.setattr(client.workflows, "start", lambda *args, **given: sent.append(given) or start(*args, **given))
    given = {"cache": False, "priority": 3, "cache_salt": "s"}
    again = tell.run(rows[:1], on=client, **given)
    assert given.items() <= sent[0].items()
    assert (again.counts.calls.cached_calls, again[0].outputs) == (0, first[0].outputs)
    with pytest.raises(ServerError, match="'other' is not served"):
        tell.run(ROWS, on=client, model="other")


def test_bars_end_with_all_rows(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    tell.run(ROWS, on=client, progress=True)
    assert "6/6" in capsys.readouterr().err


@pytest.mark.parametrize("planned", [True, False])
def test_plans_can_be_left_out(client: Client, monkeypatch: pytest.MonkeyPatch, planned: bool) -> None:
    made: list[RunPlanner] = []

    def noted(*args: Any, **options: Any) -> RunPlanner:
        made.append(RunPlanner(*args, **options))
        return made[-1]

    monkeypatch.setattr("weft.workflow.service.execution.RunPlanner", noted)
    results = tell.run([{"topic": f"planned: {planned}"}], on=client, planning=planned)
    assert not results.errors
    assert len(made) == planned


def test_leaving_early_cancels_the_run(client: Client) -> None:
    stream = tell.stream(ROWS, on=client)
    next(stream)
    stream.close()
    assert client.runs.list()[0].status in ("cancelled", "finished")


def test_an_interrupted_run_goes_on(client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    calls: list[str] = []

    class Interrupted(BaseException):
        pass

    class Stopping(Through):
        """A client that is interrupted after some events."""

        def __init__(self, most: int):
            super().__init__(client)
            self.most = most

        def events(self, run_id: str, after: int = 0) -> Any:
            calls.append(run_id)
            for number, event in enumerate(client.workflows.events(run_id, after)):
                if number == self.most:
                    raise Interrupted
                yield event

    class Lost(Through):
        """A client that is interrupted before it learns that its run has begun."""

        def start(self, *args: Any, **options: Any) -> Any:
            calls.append(client.workflows.start(*args, **options).id)
            raise Interrupted

    other = weft.flow(lambda topic: ops.text(f"{topic}"))
    with pytest.raises(ServerError, match="none"):  # which leaves nothing behind
        tell.run(ROWS, on=client, out=out, model="none")
    for _ in range(2):
        with pytest.raises(Interrupted):
            tell.run(ROWS, on=Lost(client), out=out)
    with pytest.raises(ConfigError, match="with other options, and its start was not answered"):
        tell.run(ROWS, on=client, out=out, objective="latency")
    for most in (0, 2):
        with pytest.raises(Interrupted):
            tell.run(ROWS, on=Stopping(most), out=out)
    assert Path(f"{out}.run").exists()
    with pytest.raises(ConfigError, match="another run was interrupted here"):
        other.run(ROWS, on=client, out=out)
    with pytest.raises(ConfigError, match="is not of a run of a workflow"):
        other.run(ROWS, on=client.url, out=out)
    for options in ({"model": "another"}, {"limits": RunLimits(calls=100)}):
        with pytest.raises(ConfigError, match="another model or other limits"):
            tell.run(ROWS, on=client, out=out, **options)
    results = tell.run(ROWS, on=Stopping(1000), out=out)
    assert sorted(json.loads(line)["row"] for line in out.read_text().splitlines()) == list(range(6))
    assert len(results) == 6
    assert len(set(calls)) == 1
    assert not Path(f"{out}.run").exists()


@pytest.mark.parametrize(
    "error",
    [WeftError("the connection was lost"), ServerError(502, "Bad Gateway"), ServerError(200, "The server shut down.")],
    ids=["connection", "proxy", "drain"],
)
def test_a_lost_connection_goes_on_behind_the_last_result(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: WeftError
) -> None:
    monkeypatch.setattr("weft.workflow.remote.FIRST_PAUSE_S", 0.0)
    afters: list[str] = []

    class Losing(Through):
        def events(self, run_id: str, after: str = "0") -> Any:
            afters.append(after)
            rows = 0
            for event in client.workflows.events(run_id, after):
                yield event
                rows += event.row is not None
                if rows == 2:
                    raise error

    results = tell.run(ROWS, on=Losing(client))
    assert [result["loud"] for result in results] == [f"TOPIC {number}" for number in range(6)]
    assert afters == ["0", "2", "4", "6"]


def test_an_event_that_cannot_be_read_ends_the_run(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    afters: list[str] = []

    class Failing(Through):
        def events(self, run_id: str, after: str = "0") -> Any:
            afters.append(after)
            assert len(afters) <= remote.MAX_LOST + 1
            yield next(client.workflows.events(run_id, after))
            raise WeftError("this event cannot be read")

    with pytest.raises(WeftError, match="this event cannot be read"):
        tell.run(ROWS, on=Failing(client))
    assert afters == ["0"] * (remote.MAX_LOST + 1)


def test_the_client_s_own_methods(client: Client) -> None:
    graph = weft.flow(lambda topic: ops.text(f"<{topic}>"))
    stored = client.workflows.create(graph, "mine")
    assert client.workflows.get(stored.id[:12]).graph["inputs"] == ["topic"]
    assert stored.id in [each.id for each in client.workflows.list()]
    first = client.workflows.start(stored.id, ROWS, key="k", limits={"calls": 1})
    assert client.workflows.start(stored.id, ROWS, key="k", limits={"calls": 1}).id == first.id
    types = [event.type for event in client.workflows.events(first.id)]
    assert (types[0], types.count("row"), types[-1]) == ("run", 6, "end")
    page = client.workflows.results(first.id, 4)
    assert ([row.number for row in page.data], page.has_more) == ([5, 6], False)
    client.runs.delete(first.id)
    client.workflows.delete(stored.id)
    with pytest.raises(ServerError):
        client.workflows.get(stored.id)
