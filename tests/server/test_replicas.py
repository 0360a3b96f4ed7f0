"""Several engines of one model behind one front."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from tests.server.conftest import MODEL, RunningServer, running
from tests.server.test_operations import samples
from weft.core.ids import unpack_tokens
from weft.core.wire import Append, EngineStats, Generate, Open
from weft.sim.devices import linear_forward
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine
from weft.workflow.backend.endpoint import sources_of_models

WORDS = "one two three four five six seven eight nine ten eleven twelve "


class Replicated:
    """A server over two engines."""

    def __init__(self, server: RunningServer, engines: list[FakeEngine]):
        self.server, self.engines = server, engines

    def opened(self) -> list[int]:
        """Sequences that each engine was asked for."""
        return self.server.on_loop(
            lambda: [sum(isinstance(one, Open) for one in engine.sent) for engine in self.engines]
        )

    def serve(self, prompt: str, path: str = "/v1/completions", **fields: object) -> int:
        """Index of the engine that a request went to, and was answered by."""
        before = self.opened()
        body = {"prompt": prompt, "max_tokens": 8} | fields
        if path.endswith("embeddings"):
            body = {"input": prompt}
        response = self.server.post(path, body)
        assert response.status_code == 200, response.text
        [where] = [index for index, count in enumerate(self.opened()) if count > before[index]]
        return where

    def assert_nothing_left(self) -> None:
        self.server.wait_until(lambda: not any(engine.sequences for engine in self.engines))
        assert all(runtime.num_sequences == 0 for runtime in self.server.service.models[0].runtimes)


def replicated(*, auto: bool = True, **settings: object) -> Iterator[Replicated]:
    engines = [FakeEngine(msgspec.structs.replace(DEFAULT_INFO, pid=100 + index), auto=auto) for index in range(2)]
    with running(engine=engines[0], more_engines=engines[1:], **settings) as server:
        yield Replicated(server, engines)


@pytest.fixture
def pair() -> Iterator[Replicated]:
    for found in replicated():
        yield found
        found.assert_nothing_left()


@pytest.fixture
def stepped_pair() -> Iterator[Replicated]:
    yield from replicated(auto=False, engine_wait_s=30.0)


def test_requests_are_spread_and_go_where_their_prefix_lies(pair: Replicated) -> None:
    first = pair.serve("a" + WORDS * 3)
    second = pair.serve("b" + WORDS * 3)
    assert first != second
    for _ in range(2):
        assert pair.serve("b" + WORDS * 3 + "and on") == second
        assert pair.serve("a" + WORDS * 3 + "and on") == first
    assert pair.serve("a" + WORDS * 3, path="/v1/embeddings") == first


def test_a_turn_goes_where_its_conversation_was_answered(pair: Replicated) -> None:
    talks: dict[str, list[dict[str, str]]] = {name: [{"role": "user", "content": name + WORDS}] for name in "ab"}
    homes: dict[str, set[int]] = {name: set() for name in talks}
    for _ in range(3):
        for name, messages in talks.items():
            before = pair.opened()
            message = pair.server.chat(messages=messages).json()["choices"][0]["message"]
            after = pair.opened()
            homes[name].add(next(index for index in range(2) if after[index] > before[index]))
            messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "go on"}]
    assert sorted(map(len, homes.values())) == [1, 1]
    assert homes["a"] != homes["b"]


def test_sessions_stay_together(pair: Replicated) -> None:
    homes = {name: pair.serve(name + WORDS, session_id=name) for name in "xy"}
    assert sorted(homes.values()) == [0, 1]
    for turn in range(3):
        for name, home in homes.items():
            assert pair.serve(f"{turn}{name}" + WORDS, session_id=name) == home
    assert pair.server.post("/v1/completions", {"prompt": "a", "session_id": 5}).status_code == 400
    assert pair.server.post("/v1/completions", {"prompt": "a", "session_id": "s" * 257}).status_code == 400


def test_choices_of_a_prompt_are_on_one_engine_and_prompts_on_several(pair: Replicated) -> None:
    response = pair.server.post("/v1/completions", {"prompt": ["a" + WORDS, "b" + WORDS], "n": 3, "max_tokens": 4})
    assert len(response.json()["choices"]) == 6
    generates = pair.server.on_loop(
        lambda: [sum(isinstance(one, Generate) for one in engine.sent) for engine in pair.engines]
    )
    assert generates == [3, 3]


def test_the_death_of_an_engine_interrupts_only_its_own(stepped_pair: Replicated) -> None:
    pair, server = stepped_pair, stepped_pair.server
    with ThreadPoolExecutor() as threads:

        def ask(prompt: str) -> Future[httpx.Response]:
            return threads.submit(server.post, "/v1/completions", {"prompt": prompt + WORDS, "max_tokens": 6})

        answers = []
        for name in "ab":
            answers.append(ask(name))
            server.wait_until(lambda: sum(bool(engine.sequences) for engine in pair.engines) == len(answers))
        for engine in pair.engines:
            server.on_loop(lambda engine=engine: engine.step(3))
        dying, living = pair.engines
        server.on_loop(dying.die)
        assert server.http().get("/ready").status_code == 200
        assert samples(server)["weft:engine_up", "0"] == 0
        assert samples(server)["weft:engine_up", "1"] == 1
        late = ask("a")
        server.wait_until(lambda: len(living.sequences) == 2)
        server.on_loop(lambda: living.step(12))
        assert late.result(60).status_code == answers[1].result(60).status_code == 200
        assert not answers[0].done()
        appended = len([one for one in dying.sent if isinstance(one, Append)])
        server.on_loop(dying.restart)
        server.wait_until(lambda: bool(dying.sequences))
        again = [one for one in dying.sent if isinstance(one, Append)][appended:]
        assert len(again) == 2, "the prompt, and the tokens that were told"
        server.on_loop(lambda: dying.step(12))
        assert answers[0].result(60).status_code == 200
        assert answers[0].result().json()["usage"]["completion_tokens"] == 6
    pair.assert_nothing_left()


def test_while_no_engine_answers_requests_wait(stepped_pair: Replicated) -> None:
    pair, server = stepped_pair, stepped_pair.server
    server.wait_until(lambda: server.service.models[0].was_ready)
    for engine in pair.engines:
        server.on_loop(engine.die)
    assert server.http().get("/ready").status_code == 503
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(server.post, "/v1/completions", {"prompt": WORDS, "max_tokens": 2})
        server.wait_until(lambda: server.service.num_active == 1)
        for engine in pair.engines:
            server.on_loop(engine.restart)
        server.wait_until(lambda: any(engine.sequences for engine in pair.engines))
        for engine in pair.engines:
            server.on_loop(lambda engine=engine: engine.step(4))
        assert answer.result(60).status_code == 200


def test_metrics_and_sessions_of_each_engine(pair: Replicated, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, engine in enumerate(pair.engines):

        async def stats(index: int = index) -> EngineStats:
            return EngineStats(steps=5 + index, finished={"stop": index + 1}, objective_device_s={"batch": 1.0 + index})

        monkeypatch.setattr(engine, "stats", stats)
    found = samples(pair.server)
    assert [found["weft:engine_steps_total", index] for index in "01"] == [5, 6]
    assert [found["weft:engine_up", index] for index in "01"] == [1, 1]
    # By the names of the labels: end and engine, engine and objective.
    assert [found["weft:engine_operations_total", f"stop,{index}"] for index in "01"] == [1, 2]
    assert [found["weft:engine_objective_device_seconds_total", f"{index},batch"] for index in "01"] == [1.0, 2.0]
    assert pair.server.http().get("/v1/sessions").status_code == 200
    assert pair.server.http().get("/v1/models").json()["data"][0]["id"] == MODEL


def test_plans_know_every_engine_that_answers(pair: Replicated) -> None:
    engines = sources_of_models(pair.server.service.models, MODEL).engines
    assert [(engine.model, engine.replica) for engine in engines] == [(MODEL, 0), (MODEL, 1)]


def workflow_of(rows: int) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Calls that have nothing in common, so that nothing but the plan says where they go."""
    node = {"id": "a", "op": "llm", "messages": [{"role": "user", "content": "{{q}}"}], "max_tokens": 4}
    raw = {"version": 1, "inputs": ["q"], "nodes": [node], "outputs": {"a": "a"}}
    return raw, [{"q": f"row {row} {WORDS}"} for row in range(rows)]


def run_on(pair: Replicated, rows: int, **planning: bool) -> dict[str, int]:
    """Run a workflow. Returns the engine of each row's prompt."""
    raw, given = workflow_of(rows)
    stored = pair.server.post("/v1/workflows", {"graph": raw}).json()
    body = {"rows": given, "planning": planning, "cache": False}
    assert pair.server.post(f"/v1/workflows/{stored['id']}/runs", body).json()["workflow"]["done"] == rows
    found = {}
    for index, engine in enumerate(pair.engines):
        appended = [unpack_tokens(each.tokens) for each in engine.sent if isinstance(each, Append)]
        prompts = [bytes(token for token in tokens if token < 256).decode() for tokens in appended]
        for row in given:
            if any(row["q"] in prompt for prompt in prompts):
                assert found.setdefault(row["q"], index) == index
    return found


def test_calls_of_a_run_go_to_the_engines_of_its_plan(pair: Replicated) -> None:
    """The first row is the sample; of the others each engine has half, the first ones on the first engine."""
    found = run_on(pair, 12)
    assert [found[row["q"]] for row in workflow_of(12)[1]] == [0] + [0] * 6 + [1] * 5


def test_a_dead_engine_is_no_engine_of_a_plan(pair: Replicated) -> None:
    server = pair.server
    server.wait_until(lambda: server.service.models[0].was_ready)
    server.on_loop(pair.engines[0].die)
    assert set(run_on(pair, 6).values()) == {1}
    server.on_loop(pair.engines[0].restart)


def test_plans_know_the_cost_profile_of_the_engine() -> None:
    forward = linear_forward(0.01, 0.001)
    with running(engine=FakeEngine(msgspec.structs.replace(DEFAULT_INFO, forward=forward))) as server:
        [engine] = sources_of_models(server.service.models, MODEL).engines
    assert engine.forward == forward


PROGRAM = """
from weft.sdk import Context, models

async def main(args):
    async with Context() as ctx:
        ctx.user(args)
        await ctx.generate(max_tokens=3)
    return len(await models())
"""


def test_the_runs_of_a_tenant_live_on_one_engine() -> None:
    for pair in replicated(api_keys=["a=first", "d=second"]):
        for key, engine in (("first", 1), ("second", 0)):
            before = pair.opened()
            for number in range(3):
                with pair.server.http(headers={"authorization": f"Bearer {key}"}) as client:
                    run = client.post("/v1/runs", json={"source": PROGRAM, "args": f"{number}"}).json()
                assert (run["status"], run["result"]) == ("finished", 1), run
            opened = [now - then for now, then in zip(pair.opened(), before, strict=True)]
            assert (opened[engine], opened[1 - engine]) == (3, 0)
        pair.assert_nothing_left()
