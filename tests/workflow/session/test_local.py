"""Sessions on a backend of this process: variables are futures, errors name where they began, the end is orderly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import weft
from weft import ops
from weft.abi.errors import EngineDead, InvalidRequest, NotSettable, NoValue, Unsupported
from weft.loop_thread import LoopThread
from weft.workflow.frontend.marks import NeedsValueError
from weft.workflow.frontend.trace import FlowError
from weft.workflow.frontend.variable import reference_in
from weft.workflow.graph import InvalidGraph
from weft.workflow.graph.nodes import LlmNode, PromptMessage, TextNode
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.values import PartRanges
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import RunServices
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.value_errors import NodeFailed
from weft.workflow.session.run import SessionRun
from weft.workflow.session.trace import SessionTrace
from weft.workflow.targets import WorkflowHost


class HeldBackend:
    """Answers a call with what it asks, when its text is let go; calls with "now" at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hints: list[Any] = []
        self.cancelled: list[str] = []
        self.held: dict[str, asyncio.Future[None]] = {}
        self.changed = threading.Condition()

    async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
        started()
        text = request.body["messages"][-1]["content"]
        with self.changed:
            self.asked.append(text)
            self.hints.append(request.hints)
            self.held[text] = asyncio.get_running_loop().create_future()
            self.changed.notify_all()
        try:
            if "now" not in text:
                await self.held[text]
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        if "fail" in text:
            raise ValueError(f"the model cannot say {text}")
        return ModelAnswer(f"<{text}>")

    async def split(self, text: str, ranges: PartRanges) -> list[str]:
        return [text[start:end] for start, end in ranges(range(len(text) + 1), lambda at: True)]


class Host:
    """What a session runs on."""

    def __init__(self) -> None:
        self.thread = LoopThread()
        self.backend = HeldBackend()

    def workflow_host(self) -> WorkflowHost:
        return WorkflowHost(self.thread, self.backend, "fake")

    def wait_asked(self, *texts: str) -> None:
        backend = self.backend
        with backend.changed:
            assert backend.changed.wait_for(lambda: set(texts) <= set(backend.asked), 60), backend.asked

    def sent(self) -> tuple[list[str], list[Any]]:
        return self.backend.asked, self.backend.hints

    def let_go(self, text: str) -> None:
        self.wait_asked(text)

        async def go() -> None:
            self.backend.held[text].set_result(None)

        self.thread.run(go())


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.thread.stop()


@weft.semantic_function
def write(task: weft.Input, plan: weft.Output, code: weft.Output(stop="END")):
    """Plan {{task}} now {{plan}} now code {{code}}"""


@weft.semantic_function
def review(code: weft.Input, verdict: weft.Output):
    """Review {{code}} {{verdict}}"""


def test_calls_run_as_they_are_made_and_variables_are_futures(host: Host) -> None:
    with weft.session(host) as session:
        first = ops.llm("first")
        second = ops.llm(f"second {first}")
        host.wait_asked("first")
        host.let_go("first")
        host.wait_asked("second <first>")
        assert first.get() == "<first>"
        third = ops.llm("third")
        host.let_go("second <first>")
        host.let_go("third")
        assert (third.get(), second.get(), second.get()) == ("<third>", "<second <first>>", "<second <first>>")
        assert session.counts.calls.calls == 3


def test_semantic_functions_native_functions_flows_and_operators(host: Host) -> None:
    @weft.native_function
    def count(text: str) -> int:
        return len(text)

    @weft.flow
    def twice(text: Any) -> Any:
        return ops.map(lambda part: ops.llm(f"now {part}"), text.split(" "))

    with weft.session(host):
        made = write("a game")
        assert made.plan.get() == "<Plan a game now>"
        assert made.code.get() == "<now code>"
        assert count(made.plan).get() == len("<Plan a game now>")
        assert twice(ops.text("x y")).get() == ["<now x>", "<now y>"]
        assert made.plan.strip().get() == "<Plan a game now>"


def test_fields_of_answers_are_values(host: Host) -> None:
    @weft.native_function
    def found() -> Any:
        return {"winner": "a", "list": [1, 2]}

    with weft.session(host):
        value = found()
        assert value.field("winner").get() == "a"
        assert value["list"][1].get() == 2
        with pytest.raises(NodeFailed, match=r"pick_4: .*no field 'loser'") as raised:
            value.field("loser").get()
        assert raised.value.param == "pick_4"


def test_equal_calls_are_one_unless_the_first_failed(host: Host) -> None:
    with weft.session(host) as session:
        same = [ops.llm("now", temperature=0) for _ in range(3)]
        drawn = [ops.llm("now") for _ in range(2)]
        assert {each.get() for each in (*same, *drawn)} == {"<now>"}
        assert session.counts.calls.calls == 3
        assert repr(same[0]) == repr(same[2]) != repr(drawn[0])
        broken = ops.llm("fail now", temperature=0)
        with pytest.raises(NodeFailed):
            broken.get()
        again = ops.llm("fail now", temperature=0)
        with pytest.raises(NodeFailed):
            again.get()
        assert host.backend.asked.count("fail now") == 2


def test_one_error_reaches_everyone_and_names_where_it_began(host: Host) -> None:
    with weft.session(host):
        broken = ops.llm("fail", name="broken")
        depends = ops.text(f"{broken}!")
        later = ops.llm(f"{depends} now", name="later")
        other = ops.llm("now")
        raised: list[BaseException] = []

        def ask(variable: Any) -> None:
            try:
                variable.get()
            except NodeFailed as error:
                raised.append(error)

        threads = [threading.Thread(target=ask, args=(each,)) for each in (broken, depends, later)]
        for thread in threads:
            thread.start()
        host.let_go("fail")
        for thread in threads:
            thread.join()
        assert len(raised) == 3
        assert raised[0] is raised[1] is raised[2]
        assert str(raised[0]) == "broken: the model cannot say fail"
        assert isinstance(raised[0].__cause__, ValueError)
        assert other.get() == "<now>"
        after = ops.text(f"after {later}")
        with pytest.raises(NodeFailed) as late:
            after.get()
        assert late.value is raised[0]


def test_errors_of_fields_that_are_not_there_are_not_kept(host: Host) -> None:
    with weft.session(host) as session:
        answer = ops.llm("now", name="answer")
        assert answer.get() == "<now>"
        for _ in range(3):
            with pytest.raises(NodeFailed, match="has no field 'x'"):
                host.thread.run(session._run.get(Reference("answer", ("x",))))
        assert not session._run._errors


def test_what_was_refused_and_what_merged_are_no_names() -> None:
    submitted: list[Any] = []

    def refuse(node: Any) -> None:
        if "no" in str(node):
            raise InvalidRequest("refused")

    trace = SessionTrace(submitted.append, lambda name: False, check_more=refuse)
    first = trace.add(TextNode, "text", {"template": "yes"})
    assert str(reference_in(first)) == "text_1"
    with pytest.raises(InvalidRequest, match="refused"):
        trace.add(TextNode, "text", {"template": "no"})
    again = trace.add(TextNode, "text", {"template": "yes"})
    assert reference_in(again) == reference_in(first)
    for name in ("text_2", "text_3"):
        with pytest.raises(InvalidGraph, match=f"there is no value '{name}'"):
            trace.extend([{"id": "later", "op": "text", "template": f"{{{{{name}}}}}"}])
    assert [node.id for node in submitted] == ["text_1"]


def test_an_error_within_a_body_names_its_item(host: Host) -> None:
    with weft.session(host):
        found = ops.map(lambda part: ops.llm(f"{part} now", name="note"), ops.list("a", "fail", "fail b"), name="notes")
        with pytest.raises(NodeFailed, match=r"notes\[1\]\.note: the model cannot say fail now"):
            found.get()


def test_retries_of_a_dead_engine_end_with_its_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead(request: Any, started: Any) -> ModelAnswer:
        raise EngineDead("it is gone", retry_after_s=3.0)

    monkeypatch.setattr(host.backend, "complete", dead)
    with weft.session(host):
        with pytest.raises(NodeFailed, match="one: it is gone") as raised:
            ops.llm("x", retries=0, name="one").get()
        assert isinstance(raised.value.__cause__, EngineDead)
        assert raised.value.retry_after_s == 3.0


# ---- values from outside


def test_only_values_from_outside_are_set_and_once(host: Host) -> None:
    with weft.session(host):
        decision = ops.external(schema={"type": "object", "properties": {"ok": {"type": "boolean"}}}, name="decision")
        answer = ops.llm(f"now {decision.ok}", name="answer")
        with pytest.raises(NotSettable, match="answer is computed"):
            answer.set("x")
        with pytest.raises(NotSettable, match=r"decision\.ok"):
            decision.ok.set(True)
        with pytest.raises(InvalidRequest, match=r"decision: a value of builtins\.object is not JSON"):
            decision.set(object())
        with pytest.raises(InvalidRequest, match=r"decision does not follow its schema: ok"):
            decision.set({"ok": "yes"})
        with pytest.raises(InvalidGraph, match=r"external_1\.schema: .*not checked against if"):
            ops.external(schema={"if": {"type": "string"}})
        decision.set({"ok": True})
        with pytest.raises(NotSettable, match="decision was set already"):
            decision.set({"ok": False})
        assert answer.get() == "<now true>"
        assert decision.get() == {"ok": True}


def test_a_value_that_comes_too_late_is_refused(host: Host) -> None:
    with weft.session(host):
        late = ops.external(timeout_s=0.001, name="late")
        with pytest.raises(NodeFailed, match=r"late: no value came within 0\.001 s"):
            late.get()
        with pytest.raises(NotSettable, match="late was set too late"):
            late.set(1)


def test_a_body_cannot_wait_for_a_person(host: Host) -> None:
    with weft.session(host), pytest.raises(FlowError, match="who: a value from outside"):
        ops.map(lambda part: ops.external(name="who"), ops.list("a"))


# ---- what has no value


def test_a_wait_may_have_an_end(host: Host) -> None:
    with weft.session(host):
        held = ops.llm("held", name="held")
        with pytest.raises(TimeoutError, match=r"held has no value after 0\.01 s"):
            held.get(timeout_s=0.01)
        host.let_go("held")
        assert held.get() == "<held>"


def test_leaving_cancels_what_runs_and_keeps_what_is_there(host: Host) -> None:
    with weft.session(host):
        there, held, never = ops.llm("now"), ops.llm("held", name="held"), ops.external(name="never")
        assert there.get() == "<now>"
        host.wait_asked("held")
        waiting: list[Any] = []

        def ask() -> None:
            try:
                held.get()
            except NoValue as error:
                waiting.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
    thread.join()
    assert host.backend.cancelled == ["held"]
    assert there.get() == "<now>"
    assert len(waiting) == 1
    for variable, message in [(held, "held has no value: the session was closed"), (never, "never .* nobody set it")]:
        with pytest.raises(NoValue, match=message) as raised:
            variable.get()
        assert raised.value.param == message.partition(" ")[0]
    with pytest.raises(NoValue, match="nobody set it"):
        never.set(1)
    with pytest.raises(FlowError, match=r"weft\.session"):
        ops.llm("after")


def test_wait_waits_for_all_that_was_made(host: Host) -> None:
    with weft.session(host) as session:
        made = [ops.llm("now"), ops.llm("now fail"), ops.text("x")]
        session.wait()
    assert made[0].get() == "<now>"
    with pytest.raises(NodeFailed):
        made[1].get()


def test_an_error_of_the_user_s_code_closes_the_session_too(host: Host) -> None:
    def work() -> None:
        with weft.session(host):
            ops.llm("held")
            host.wait_asked("held")
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert host.backend.cancelled == ["held"]


def test_a_session_is_opened_once(host: Host) -> None:
    session = weft.session(host)
    with session:
        pass
    with pytest.raises(RuntimeError, match="opened once"), session:
        pass


def test_variables_stay_in_their_session(host: Host) -> None:
    with weft.session(host):
        mine = ops.llm("now")
        with weft.session(host):
            with pytest.raises(FlowError):
                ops.llm([mine.chat, ops.user("x")])
            assert mine.get() == "<now>"


def test_functions_run_outside_of_every_session(host: Host) -> None:
    @weft.native_function
    def inner(text: str) -> str:
        return f"{text}!"

    @weft.native_function
    def outer(text: str) -> str:
        return inner(text)  # a call, not a node of the session around

    @weft.native_function
    async def later(text: str) -> str:
        return f"{text}?"

    with weft.session(host), weft.session(host):
        assert later(outer("x")).get() == "x!?"


def test_mistakes_are_refused_at_their_line(host: Host) -> None:
    with weft.session(host):
        numbers = ops.list("a", "b")
        with pytest.raises(NeedsValueError, match=r"ops\.join"):
            ops.llm(f"{numbers}")
        with pytest.raises(InvalidGraph, match=r"test_local\.py:\d+: llm_\d.messages\[0\]\.content: there is no value"):
            ops.llm("{{nothing}}")
        with pytest.raises(NeedsValueError, match=r"value\.get\(\)"):
            bool(numbers)
    with pytest.raises(FlowError, match=r"weft\.session"):
        review("x")


def test_flows_have_no_values() -> None:
    @weft.flow
    def asks(x: Any) -> Any:
        return ops.llm(x).get()

    with pytest.raises(NeedsValueError, match="return it"):
        _ = asks.graph


def test_a_body_has_no_values(host: Host) -> None:
    with weft.session(host), pytest.raises(NeedsValueError, match="return it"):
        ops.map(lambda part: ops.llm(part).get(), ops.list("a"))


def test_limits_and_missing_functions_are_errors_of_their_nodes(host: Host) -> None:
    with weft.session(host, limits=RunLimits(calls=1), functions={"f": lambda x: x + "!"}):
        assert ops.function("f", x=ops.llm("now")).get() == "<now>!"
        with pytest.raises(NodeFailed, match=r"over: .*1 call "):
            ops.llm("now", name="over").get()
        with pytest.raises(NodeFailed) as raised:
            ops.function("g").get()
        assert isinstance(raised.value.__cause__, Unsupported)


def test_calls_carry_the_label_of_the_session(host: Host) -> None:
    with weft.session(host, session_id="mine") as session:
        ops.llm("now").get()
        assert session.id == "mine"
        assert host.backend.hints[-1]["session_id"] == "mine"
    with weft.session(host) as other:
        ops.llm("now").get()
        assert host.backend.hints[-1]["session_id"] == other.id != "mine"


def test_calls_say_what_their_values_are_wanted_for(host: Host) -> None:
    with weft.session(host):
        first = ops.llm("first")
        said = ops.llm(f"now {first}")
        bulk = ops.llm(f"now bulk {first}")
        host.wait_asked("first")
        for variable, criterion in ((bulk, weft.THROUGHPUT), (said, weft.LATENCY), (said, weft.deadline(60))):
            with pytest.raises(TimeoutError):
                variable.get(criterion, timeout_s=0.0)
        host.let_go("first")
        assert said.get(weft.TTFT) == "<now <first>>"
        assert bulk.get() == "<now bulk <first>>"
        priorities = {text: hints.get("priority") for text, hints in zip(*host.sent(), strict=True)}
        assert priorities == {"first": None, "now <first>": -10, "now bulk <first>": 10}
        objectives = {text: hints.get("objective") for text, hints in zip(*host.sent(), strict=True)}
        assert objectives == {"first": None, "now <first>": "latency", "now bulk <first>": "throughput"}
        assert host.backend.asked[1] == "now <first>"
        for wrong in (5, "latency"):
            with pytest.raises(TypeError, match=r"weft\.LATENCY.*timeout_s"):
                said.get(wrong)  # type: ignore[arg-type]


# ---- asynchronous code


def test_asynchronous_code(host: Host) -> None:
    async def branch(number: int) -> Any:
        return await review(f"now {number}").aget()

    async def main() -> None:
        async with weft.session(host) as session:
            found = await asyncio.gather(*(branch(number) for number in range(5)))
            assert found == [f"<Review now {number}>" for number in range(5)]
            broken = ops.llm("fail now")
            await session.wait_async()
            with pytest.raises(NodeFailed):
                await broken.aget()
            held = ops.llm("held", name="held")
            with pytest.raises(TimeoutError):
                await held.aget(timeout_s=0.01)
            waiting = asyncio.ensure_future(held.aget())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            host.let_go("held")
            assert await held.aget() == "<held>"
        assert await held.aget() == "<held>"

    asyncio.run(main())


def test_a_cancelled_wait_leaves_nothing_behind(host: Host) -> None:
    async def main() -> None:
        async with weft.session(host) as session:
            held = ops.llm("held")
            waits = [asyncio.ensure_future(held.aget()) for _ in range(3)]
            host.wait_asked("held")
            await asyncio.sleep(0)
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            host.let_go("held")
            assert await held.aget() == "<held>"
            assert session._run._waiting == {}

    asyncio.run(main())


def test_an_interrupted_end_leaves_nobody_waiting() -> None:
    class SlowToStop(HeldBackend):
        async def complete(self, request: ModelRequest, started: Callable[[], None]) -> ModelAnswer:
            asked.set()
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                stopping.set()
                await may_stop.wait()
                raise

    async def main() -> None:
        run = SessionRun("s", RunServices(SlowToStop()))
        run.submit([LlmNode(id="a", messages=(PromptMessage(role="user", content="hi"),))])
        waiting = asyncio.ensure_future(run.get(Reference("a")))
        await asyncio.wait_for(asked.wait(), 60)
        closing = asyncio.ensure_future(run.close("it was ended"))
        await asyncio.wait_for(stopping.wait(), 60)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(NoValue, match="it was ended"):
            await asyncio.wait_for(waiting, 60)
        may_stop.set()
        await run.close()

    asked, stopping, may_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    asyncio.run(main())


def test_a_closed_session_has_nothing_to_wait_for(host: Host) -> None:
    with weft.session(host) as session:
        ops.llm("now").get()
    session.wait()
    asyncio.run(session.wait_async())


def test_a_model_that_is_closed_ends_what_runs_on_it_with_its_reason(host: Host) -> None:
    flow = weft.flow(lambda q: ops.llm(f"{q}"))
    raised: list[BaseException] = []

    def call() -> None:
        try:
            flow.run([{"q": "held"}], on=host, planning=False)
        except BaseException as error:
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    host.wait_asked("held")
    host.thread.stop()
    caller.join(60)
    assert [str(error) for error in raised] == ["this LLM was closed before the call ended"]
    host.thread = LoopThread()  # for the end of the fixture
