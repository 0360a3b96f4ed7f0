"""What runs of workflows on a server tell its engines: objectives, prefixes to keep, conversations that go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import RunningServer, running
from weft.config import WorkflowsConfig
from weft.core.wire import Append, EndRetain, Open, Release, Retain
from weft.endpoints.record import namespace_of
from weft.testing.fake_engine import FakeEngine
from weft.workflow.service.service import WorkflowService

Json = dict[str, Any]
ROLES = [f"You are number {number}, and you always say what you mean in a few words." for number in range(2)]
SALT = "s"


def call(name: str, system: str, user: str, **fields: Any) -> Json:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"id": name, "op": "llm", "messages": messages, "max_tokens": 4, **fields}


def graph(*nodes: Json, **outputs: str) -> Json:
    return {"version": 1, "inputs": ["q"], "nodes": list(nodes), "outputs": outputs}


BY_TURNS = graph(
    call("a", ROLES[0], "{{q}}"),
    call("b", ROLES[1], "{{q}} {{a}}"),
    call("c", ROLES[0], "{{q}} {{b}}"),
    call("d", ROLES[1], "{{q}} {{c}}"),
    out="d",
)
CHAT = graph(
    call("first", ROLES[0], "{{q}}"),
    {"id": "next", "op": "llm", "messages": [{"chat": "first"}, {"role": "user", "content": "On."}], "max_tokens": 4},
    out="next",
)
VOTES = graph(
    call("one", "One.", "{{q}}"),
    call("two", "Two.", "{{q}}"),
    call("judge", "Judge.", "{{one}} {{two}}"),
    call("log", "Log.", "{{q}}"),
    verdict="judge",
    log="log",
)


class Served:
    """A server over a fake engine that is asked to run workflows."""

    def __init__(self, server: RunningServer, engine: FakeEngine):
        self.server, self.engine = server, engine

    def run(self, raw: Json, rows: int = 2, **fields: Any) -> Json:
        """Run a workflow to its end. Returns the run."""
        self.server.on_loop(self.engine.sent.clear)
        stored = self.server.post("/v1/workflows", {"graph": raw}).json()
        given = [{"q": f"question {number}"} for number in range(rows)]
        response = self.server.post(f"/v1/workflows/{stored['id']}/runs", {"rows": given, "cache": False} | fields)
        answer: Json = response.json()
        assert response.status_code == 200, answer
        return answer

    def sent(self, kind: type[Any]) -> list[Any]:
        """Commands of a kind that the engine has had since the run began."""
        return self.server.on_loop(lambda: [each for each in self.engine.sent if isinstance(each, kind)])


@pytest.fixture
def served() -> Iterator[Served]:
    engine = FakeEngine()
    with running(engine=engine) as server:
        yield Served(server, engine)


def objectives(served: Served) -> dict[str, str]:
    """The objective of each call, by the beginning of its system message."""
    names = {opened.seq: opened.objective for opened in served.sent(Open)}
    found = {}
    for appended in served.sent(Append):
        text = bytes(token for token in appended.tokens[::4]).decode(errors="replace")
        for name in ("One.", "Two.", "Judge.", "Log."):
            if name in text:
                found[name] = names[appended.seq]
    return found


def test_calls_carry_the_objectives_that_follow_from_the_outputs(served: Served) -> None:
    served.run(VOTES, objective={"verdict": "latency"})
    # The votes are a task group: the last of them counts, so they are for throughput.
    assert objectives(served) == {
        "One.": "throughput",
        "Two.": "throughput",
        "Judge.": "latency",
        "Log.": "throughput",
    }
    served.run(VOTES)
    assert set(objectives(served).values()) == {"throughput"}
    served.run(VOTES, objective="latency")
    assert objectives(served)["Log."] == "latency"


def test_every_objective_of_an_engine_may_be_that_of_a_run(served: Served) -> None:
    served.run(VOTES, objective={"verdict": "ttft", "log": "batch"})
    assert objectives(served) == {"One.": "throughput", "Two.": "throughput", "Judge.": "ttft", "Log.": "batch"}
    served.run(VOTES, objective="batch", planning=False)
    assert set(objectives(served).values()) == {"batch"}


@pytest.mark.parametrize("planning", [True, False])
def test_a_deadline_counts_from_the_beginning_of_the_run(served: Served, planning: bool) -> None:
    served.run(VOTES, rows=1, objective="deadline", deadline_s=600, planning=planning)
    given = {opened.deadline_s for opened in served.sent(Open)}
    assert {opened.objective for opened in served.sent(Open)} == {"deadline"}
    stages = (300, 600) if planning else (600,)
    assert all(any(stage - 60 < seconds <= stage for stage in stages) for seconds in given), given
    assert all(any(stage - 60 < seconds <= stage for seconds in given) for stage in stages), given


def test_the_server_says_what_a_request_does_not() -> None:
    engine, config = FakeEngine(), WorkflowsConfig(planning=False, pinned_part=0.0, objective="batch")
    with running(engine=engine, workflows=lambda models: WorkflowService(models, config)) as server:
        served = Served(server, engine)
        served.run(BY_TURNS)
        assert {opened.objective for opened in served.sent(Open)} == {"batch"}
        assert served.sent(Retain) == []
        served.run(BY_TURNS, planning=True, objective="latency")
        assert {opened.objective for opened in served.sent(Open)} == {"latency"}
        assert served.sent(Retain) == []
        served.run(BY_TURNS, planning={"pinned_part": 0.5})
        assert len(served.sent(Retain)) == 2


def test_a_call_with_an_objective_of_its_own_keeps_it(served: Served) -> None:
    served.run(graph(call("a", "One.", "{{q}}", objective="batch"), out="a"), objective="latency")
    assert objectives(served) == {"One.": "batch"}


def test_objectives_and_settings_that_do_not_exist_are_refused(served: Served) -> None:
    stored = served.server.post("/v1/workflows", {"graph": VOTES}).json()
    path = f"/v1/workflows/{stored['id']}/runs"
    for fields, name in (
        ({"objective": {"judge": "latency"}}, "objective"),
        ({"objective": "soon"}, "objective"),
        ({"objective": "deadline"}, "deadline_s"),
        ({"objective": {"log": "deadline"}, "deadline_s": 0}, "deadline_s"),
        ({"deadline_s": 5}, "deadline_s"),
        ({"planning": "no"}, "planning"),
        ({"planning": {"pin": True}}, "planning"),
        ({"planning": {"pinned_part": 0.9}}, "planning"),
    ):
        response = served.server.post(path, {"rows": [{"q": "x"}]} | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(name), response.text


def test_prefixes_are_kept_in_the_namespace_of_their_calls_and_all_let_go(served: Served) -> None:
    run = served.run(BY_TURNS, cache_salt=SALT)
    retains = served.sent(Retain)
    assert len(retains) == 2
    assert {each.namespace for each in retains} == {namespace_of("", SALT)}
    assert all(not len(each.tokens) % (16 * 4) for each in retains)
    assert [each.retain for each in served.sent(EndRetain)] == [each.op for each in retains]
    pins = run["workflow"]["pins"]
    assert (pins["retained"], pins["refused"], pins["broken"]) == (2, 0, 0)
    served.run(BY_TURNS, planning={"pins": False})
    assert served.sent(Retain) == []


def test_engines_are_told_which_conversations_go_on(served: Served) -> None:
    served.run(CHAT, rows=1)
    assert [each.kind for each in served.sent(Release)] == ["workflow", ""]
    served.run(CHAT, rows=1, planning={"turns": False})
    assert [each.kind for each in served.sent(Release)] == ["chat", "chat"]


def test_the_next_run_of_the_same_calls_is_planned_with_what_this_one_measured(served: Served) -> None:
    served.run(VOTES, rows=20)
    tables = served.server.service.workflows.runs._tables
    weights = served.server.service.models[0].weights
    from weft.workflow.graph import canonical, graph_from_dict
    from weft.workflow.run.known_statistics import KnownStatistics

    model = served.server.service.models[0].names[0]
    known = KnownStatistics(tables.statistics, canonical(graph_from_dict(VOTES)), f"{weights} {model}")
    assert {label: figures["output_tokens"] for label, figures in known.load().items()} == dict.fromkeys(
        ("one", "two", "judge", "log"), 4.0
    )


def test_a_run_that_is_cancelled_and_resumed_leaves_nothing_retained() -> None:
    engine = FakeEngine(auto=False)
    with running(engine=engine) as server:
        served = Served(server, engine)
        stored = server.post("/v1/workflows", {"graph": BY_TURNS}).json()
        body = {"rows": [{"q": "x"}], "cache": False, "background": True}
        run = server.post(f"/v1/workflows/{stored['id']}/runs", body).json()["id"]

        def num_sent(kind: type[Any]) -> int:
            return sum(isinstance(each, kind) for each in engine.sent)

        def stepped(until: Any) -> None:
            def step() -> bool:
                engine.step()
                return bool(until())

            server.wait_until(step)

        stepped(lambda: num_sent(Retain))
        assert server.post(f"/v1/runs/{run}/cancel", {}).json()["status"] == "cancelled"
        server.wait_until(lambda: 0 < num_sent(Retain) == num_sent(EndRetain))
        assert server.post(f"/v1/runs/{run}/resume", {}).status_code == 200
        live = server.service.workflows.runs._live
        stepped(lambda: run not in live)
        assert server.http().get(f"/v1/runs/{run}").json()["status"] == "finished"
        server.wait_until(lambda: num_sent(Retain) == num_sent(EndRetain))
        assert [each.retain for each in served.sent(EndRetain)] == [each.op for each in served.sent(Retain)]
        assert server.on_loop(lambda: server.service.models[0].runtime.retains.num_pages("")) == 0
