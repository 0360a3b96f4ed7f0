"""Sessions on a server of ours: the graph grows there, functions run here, and nothing else differs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

import weft
from tests.server.conftest import ManualTimer, RunningServer, running
from tests.workflow.session.test_equal import TOPICS, everything
from weft import ops
from weft.abi.errors import EngineDead, InvalidRequest, NotSettable, NoValue, Unsupported
from weft.config import EngineConfig, WorkflowsConfig
from weft.engine.inline import InlineEngine
from weft.llm import LLM
from weft.tokenizers.load import load_tokenizer
from weft.workflow.frontend.variable import Variable
from weft.workflow.graph.values import RowError
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.value_errors import NodeFailed
from weft.workflow.service.service import WorkflowService
from weft.workflow.session import remote
from weft.workflow.session.remote import RemoteSession, has_sessions
from weft.workflow.session.run import SessionRun

OPTIONS: dict[str, Any] = {"num_pages": 96, "threads": 1, "dtype": "float64", "max_context": 512}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    yield shared
    assert shared.on_loop(lambda: dict(shared.service.sessions._sessions)) == {}, "a session ends on the server too"
    shared.assert_nothing_left()


@weft.semantic_function(max_tokens=4, temperature=0)
def write(task: weft.Input, plan: weft.Output, code: weft.Output):
    """Plan {{task}} now {{plan}} now code {{code}}"""


def test_the_graph_grows_on_the_server(server: RunningServer) -> None:
    with weft.session(server.url, session_id="mine") as session:
        assert isinstance(session._run, RemoteSession)
        made = write("a game")
        later = ops.text(f"{made.code}!")
        assert later.get(weft.LATENCY) == made.code.get(weft.deadline(60)) + "!"
        assert made.plan.strip().get() == made.plan.get().strip()
        assert isinstance(made.plan.get(), str)
        assert [key[1] for key in server.on_loop(lambda: list(server.service.sessions._sessions))] == ["mine"]
        with pytest.raises(Unsupported, match="counts"):
            _ = session.counts
    assert later.get() == made.code.get() + "!"


def test_functions_of_the_client_run_in_the_client(server: RunningServer) -> None:
    threads = []

    @weft.native_function
    def shout(text: str, times: int = 1) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"said": text.upper() * times}

    @weft.native_function(retries=1)
    async def fragile(text: str) -> str:
        threads.append(threading.current_thread())
        if len(threads) < 3:
            raise ValueError("not yet")
        return text

    with weft.session(f"{server.url}/v1/"):
        said = shout(ops.text("x"), times=2)
        again = fragile(said.field("said"))
        assert ops.llm(f"{again}", max_tokens=2).get() is not None
        assert (said.get(), again.get()) == ({"said": "XX"}, "XX")
        with pytest.raises(NotSettable, match="is computed"):
            said.set(1)
    assert len(threads) == 3


def test_errors_name_where_they_began(server: RunningServer) -> None:
    @weft.native_function
    def broken(text: str) -> str:
        raise ValueError("no")

    @weft.native_function
    def after(text: str) -> str:
        return text

    with weft.session(server.url):
        first = broken(ops.text("x"))
        then = ops.text(f"{after(first)}!")
        picked = ops.text("text").regex("[0-9]")
        told = ops.text(f"{picked}?")
        with pytest.raises(NodeFailed, match="function_1: no") as raised:
            first.get()
        assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(NodeFailed) as same:
            then.get()
        assert same.value is raised.value
        with pytest.raises(NodeFailed, match=r"pick_1: '\[0-9\]' is not found") as found:
            told.get()
        with pytest.raises(NodeFailed) as again:
            picked.get()
        assert again.value is found.value
        program = ops.program("agent", {})
        with pytest.raises(NodeFailed, match=r"program_1: .*no program 'agent'"):
            ops.text(f"{program}").get()
        assert ops.text("fine").get() == "fine"
        with pytest.raises(Unsupported, match="in a body"):
            ops.map(lambda part: after(part), ops.list("a"))
    for variable in (then, told):
        with pytest.raises(NodeFailed):
            variable.get()


def test_what_has_failed_is_computed_again_though_only_what_depends_on_it_was_asked_for(server: RunningServer) -> None:
    def alone() -> Variable:
        return ops.text("a").regex("[0-9]")

    def in_a_body() -> Variable:
        return ops.join(ops.map(lambda part: part.regex("[0-9]"), ops.list("a")))

    def refused() -> Variable:
        return ops.llm("hi", model="none", temperature=0)

    for make in (alone, in_a_body, refused):
        with weft.session(server.url):
            first = make()
            assert repr(make()) == repr(first)
            with pytest.raises(NodeFailed):
                ops.text(f"{first}!").get()
            assert repr(make()) != repr(first), make.__name__


def test_errors_that_cannot_be_told_as_they_are_reach_what_depends_on_them(server: RunningServer) -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            return None  # type: ignore[return-value]

    @weft.native_function
    def wordless(text: str) -> str:
        raise Wordless

    @weft.native_function
    def verbose(text: str) -> str:
        raise ValueError("x" * (20 << 20))

    @weft.native_function
    def large(text: str) -> str:
        return "x" * (17 << 20)

    with weft.session(server.url):
        for function, words in ((wordless, "Wordless"), (verbose, "xxx"), (large, "16 MiB")):
            with pytest.raises(NodeFailed, match=words):
                ops.text(f"{function(ops.text('x'))}!").get()
        assert ops.text("fine").get() == "fine"


def test_values_from_outside(server: RunningServer) -> None:
    with weft.session(server.url):
        decision, never = ops.external(name="decision"), ops.external(name="never")
        answer = ops.text(f"said {decision}")
        with pytest.raises(TimeoutError, match=r"answer|text_1 has no value after 0\.01 s"):
            answer.get(timeout_s=0.01)
        decision.set(None)
        assert answer.get() == "said null"
        with pytest.raises(NotSettable, match="decision was set already"):
            decision.set(1)
        with pytest.raises(NotSettable, match="text_1 is computed"):
            answer.set(1)
        with pytest.raises(InvalidRequest, match="is not JSON"):
            never.set(object())
    assert answer.get() == "said null"
    with pytest.raises(NoValue, match=r"never has no value: the session was closed"):
        never.get()
    with pytest.raises(NoValue):
        never.set(1)


def test_a_wait_ends_with_the_session(server: RunningServer) -> None:
    found: list[BaseException] = []
    with weft.session(server.url):
        never = ops.external(name="never")
        ready = threading.Event()

        def wait() -> None:
            ready.set()
            try:
                never.get()
            except NoValue as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        ready.wait()
        server.wait_until(lambda: any(each.is_waited_for for each in server.service.sessions._sessions.values()))
    thread.join()
    assert "never has no value: the session was closed" in str(found[0])


def test_a_session_that_expired_there_says_so() -> None:
    timer = ManualTimer()
    workflows = partial(WorkflowService, config=WorkflowsConfig(session_idle_s=100.0))
    with running(timer=timer, workflows=workflows) as server, weft.session(server.url):
        never = ops.external(name="never")
        there = ops.text("x")
        assert there.get() == "x"
        server.wait_until(lambda: bool(timer.sleepers))
        server.on_loop(lambda: timer.advance(150.0))
        server.wait_until(lambda: not server.service.sessions._sessions)
        with pytest.raises(NoValue, match=r"expired after 100 s"):
            never.get()
        assert there.get() == "x"
        for later in (ops.text(f"{there}!"), ops.text("y")):
            with pytest.raises(NoValue, match=r"can have no value: The session .* has ended: .* 100 s"):
                later.get()
        assert not server.service.sessions._sessions


def test_what_the_server_refuses_fails_alone(server: RunningServer) -> None:
    with weft.session(server.url):
        made = [ops.llm("hi", max_tokens=2, model=name) for name in ("fake-model", "none", "fake-model")]
        depends = ops.text(f"{made[1]}!")
        with pytest.raises(NodeFailed, match="llm_2: The model 'none' is not served"):
            depends.get()
        assert all(isinstance(made[number].get(), str) for number in (0, 2))


def test_arguments_that_cannot_be_made_fail_what_depends_on_them(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    @weft.native_function
    def shout(said: str) -> str:
        return said.upper()

    def refuse(values: Any, value_of: Any) -> Any:
        raise RowError("a value is too long")

    monkeypatch.setattr(remote, "fill_values", refuse)
    with weft.session(server.url):
        made = ops.text(f"{shout(ops.text('a'))}!")
        with pytest.raises(NodeFailed, match="a value is too long"):
            made.get()


def test_options_of_clients_keep_the_graph_here(server: RunningServer) -> None:
    with weft.session(server.url, limits=RunLimits(calls=1)) as session:
        assert isinstance(session._run, SessionRun)
        assert isinstance(ops.llm("x", max_tokens=2).get(), str)
        with pytest.raises(NodeFailed, match="1 call"):
            ops.llm("y", max_tokens=2).get()


def test_asynchronous_code(server: RunningServer) -> None:
    async def main() -> None:
        async with weft.session(server.url) as session:
            made = [ops.llm(f"say {number}", max_tokens=2, temperature=0) for number in range(30)]
            found = await asyncio.gather(*(each.aget() for each in made))
            await session.wait_async()
            assert [each.get() for each in made] == found

    asyncio.run(main())


def test_a_server_that_is_not_there_is_an_error_of_opening(server: RunningServer) -> None:
    with pytest.raises(EngineDead, match="no answer"), weft.session("http://127.0.0.1:9"):
        pass


@pytest.mark.parametrize("reply", [
    httpx.Response(404, json={"detail": "Not Found"}),
    httpx.Response(404, text="<html>"),
    httpx.Response(200, json=[]),
    httpx.Response(404, json={"error": {"message": "x", "code": "model_not_found"}}),
    httpx.Response(404, json={"error": None}),
])  # fmt: skip
def test_other_servers_have_no_sessions(reply: httpx.Response) -> None:
    async def main() -> bool:
        transport = httpx.MockTransport(lambda request: reply)
        async with httpx.AsyncClient(base_url="http://other", transport=transport) as http:
            return await has_sessions(http)

    assert asyncio.run(main()) is False


@pytest.mark.slow
def test_a_session_on_a_server_gives_what_a_flow_gives() -> None:
    flow = weft.flow(everything)
    with LLM("weft-tiny", **OPTIONS) as llm:
        expected = [dict(result.outputs) for result in flow.run([{"topic": topic} for topic in TOPICS], llm)]
    engine = InlineEngine.from_config(EngineConfig(**OPTIONS))
    with running(engine=engine, tokenizer=load_tokenizer("weft-tiny"), names=["weft-tiny"]) as server:
        server.wait_until(lambda: server.service.ready)
        with weft.session(server.url):
            made = [everything(ops.text(topic)) for topic in TOPICS]
            found = [{name: variable.get() for name, variable in each.items()} for each in made]
        assert found == expected
        server.wait_until(lambda: not server.runtime.num_sequences)
