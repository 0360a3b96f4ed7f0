"""Explanations before a run say what the prompt cache has, and nothing is called or changed for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import create, start
from tests.workflow.shapes import function, graph, llm
from weft import ops
from weft.llm import LLM
from weft.store.answers import AnswerTable
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.service.service import WorkflowService

ROWS = [{"q": str(row)} for row in range(3)]


@pytest.fixture
def model() -> Iterator[LLM]:
    with LLM.over(FakeEngine, byte_tokenizer()) as opened:
        yield opened


def chain(last: str) -> Any:
    def flow(q: Any) -> Any:
        hello = ops.llm("Say hello.", max_tokens=4, temperature=0)
        first = ops.llm(f"Say {q}", max_tokens=4, temperature=0)
        second = ops.llm([first.chat, ops.user("More.")], max_tokens=4, seed=7, temperature=1)
        return ops.llm(f"{hello} {second} {last}", max_tokens=4, temperature=0)

    return weft.flow(flow)


def test_a_warm_cache_says_what_will_not_be_computed(model: LLM, tmp_path: Path) -> None:
    cold = chain("a").explain(ROWS, on=model, cache=tmp_path / "cache")
    assert cold.to_dict()["prompt_cache"] == {"calls": {}, "rows": 0}
    assert not (tmp_path / "cache").exists()
    ran = chain("a").run(ROWS[:2], on=model, cache=tmp_path / "cache")
    assert ran.counts.calls.cached_calls == 0

    made = chain("a").explain(ROWS, on=model, cache=tmp_path / "cache")
    found = made.to_dict()
    assert found["prompt_cache"]["rows"] == 2
    again = chain("a").run(ROWS, on=model, cache=tmp_path / "cache").counts
    # What it said comes true. The constant call is merged where rows ask for it at once.
    assert found["prompt_cache"]["calls"] == {
        node: each.cached_calls + each.merged_calls
        for node, each in chain("a").run(ROWS, on=model, cache=tmp_path / "cache").counts.by_node.items()
        if node == "llm_1"
    } | {"llm_2": 2, "llm_3": 2, "llm_4": 2}
    assert found["predicted"]["calls"] == again.calls.calls == 3
    passes = {each["name"]: each["removed"] for each in found["passes"]}
    assert passes["substitute_cached"] == ["llm_1"]
    said = str(made)
    assert "substitute_cached: removed llm_1" in said
    assert "llm_2: 2 calls have their answers" in said
    assert "2 rows make no call" in said


def test_after_a_change_of_the_last_call_only_that_one_is_to_be_computed(model: LLM, tmp_path: Path) -> None:
    chain("a").run(ROWS, on=model, cache=tmp_path)
    found = chain("b").explain(ROWS, on=model, cache=tmp_path).to_dict()
    assert found["prompt_cache"] == {"calls": {"llm_1": 3, "llm_2": 3, "llm_3": 3}, "rows": 0}
    ran = chain("b").run(ROWS, on=model, cache=tmp_path).counts
    assert {node: each.calls for node, each in ran.by_node.items() if each.calls} == {"llm_4": 3}


def test_what_is_never_kept_is_never_said_to_be(model: LLM, tmp_path: Path) -> None:
    drawn = weft.flow(lambda q: ops.llm(f"Say {q}", max_tokens=4, temperature=1))
    excluded = weft.flow(lambda q: ops.llm(f"Say {q}", max_tokens=4, temperature=0, cache=False))
    for flow in (drawn, excluded):
        flow.run(ROWS, on=model, cache=tmp_path)
        assert flow.explain(ROWS, on=model, cache=tmp_path).to_dict()["prompt_cache"]["calls"] == {}


def test_rows_that_are_only_counted_have_the_answers_of_constant_calls(model: LLM, tmp_path: Path) -> None:
    chain("a").run(ROWS, on=model, cache=tmp_path)
    figures = {"q": {"output_tokens": 5}}
    found = chain("a").explain(100, on=model, cache=tmp_path, statistics=figures).to_dict()
    assert found["prompt_cache"] == {"calls": {"llm_1": 1}, "rows": 0}
    assert {each["name"]: each["removed"] for each in found["passes"]}["substitute_cached"] == ["llm_1"]
    assert found["predicted"]["calls"] == 300


def test_functions_are_not_called(model: LLM, tmp_path: Path) -> None:
    called: list[str] = []

    def loud(text: str) -> str:
        called.append(text)
        return text.upper()

    @weft.flow
    def flow(q: Any) -> Any:
        first = ops.llm(f"Say {q}", max_tokens=4, temperature=0)
        return ops.llm(f"{ops.function(loud, first, retries=3)}", max_tokens=4, temperature=0)

    flow.run(ROWS, on=model, cache=tmp_path)
    called.clear()
    found = flow.explain(ROWS, on=model, cache=tmp_path).to_dict()
    assert called == []
    assert found["prompt_cache"] == {"calls": {"llm_1": 3}, "rows": 0}
    assert found["predicted"]["calls"] == 6


ASK = graph(llm("a", "Say {{q}}", max_tokens=3, temperature=0), llm("b", "{{a}}?", max_tokens=2, temperature=0))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(api_keys=["alice=a", "bob=b"], workflows=partial(WorkflowService)) as made:
        yield made


def test_a_server_looks_into_the_cache_of_the_tenant(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    marked: list[bool] = []
    get = AnswerTable.get
    with server.http() as client:
        start(client, ASK, ROWS[:2], headers=alice)
        start(client, ASK, ROWS[2:], headers=alice, cache_salt="s")

        def noted(self: Any, tenant: str, key: str, *, marks_use: bool = True) -> Any:
            marked.append(marks_use)
            return get(self, tenant, key, marks_use=marks_use)

        monkeypatch.setattr(AnswerTable, "get", noted)

        def found(headers: dict[str, str], **fields: Any) -> Any:
            path = f"/v1/workflows/{create(client, ASK, headers)}/explain"
            response = client.post(path, json={"rows": ROWS, **fields}, headers=headers)
            assert response.status_code == 200, response.text
            return response.json()

        sent = server.on_loop(lambda: len(server.engine.sent))
        of_alice = found(alice)
        assert of_alice["prompt_cache"] == {"calls": {"a": 2, "b": 2}, "rows": 2}
        assert of_alice["predicted"]["calls"] == 2
        assert found(alice, cache_salt="s")["prompt_cache"] == {"calls": {"a": 1, "b": 1}, "rows": 1}
        assert found(bob)["prompt_cache"] == {"calls": {}, "rows": 0}
        assert "prompt_cache" not in found(alice, cache=False)
        assert (
            "a: 2 calls have their answers"
            in client.post(
                f"/v1/workflows/{create(client, ASK, alice)}/explain",
                json={"rows": ROWS, "format": "text"},
                headers=alice,
            ).text
        )
        assert server.on_loop(lambda: len(server.engine.sent)) == sent
        assert marked
        assert not any(marked)


def test_what_a_server_cannot_run_is_explained_without_the_cache(server: RunningServer) -> None:
    raw = graph(function("f", "mine", x="{{q}}"), llm("a", "{{f}}", temperature=0))
    with server.http(headers={"authorization": "Bearer a"}) as client:
        response = client.post(f"/v1/workflows/{create(client, raw)}/explain", json={"rows": ROWS})
        assert response.status_code == 200
        assert response.json()["prompt_cache"] == {"calls": {}, "rows": 0}


def test_a_run_that_was_made_before_computes_nothing(model: LLM, tmp_path: Path) -> None:
    chain("a").run(ROWS, on=model, cache=tmp_path)
    made = chain("a").explain(ROWS, on=model, cache=tmp_path)
    found = made.to_dict()
    assert found["prompt_cache"]["rows"] == 3
    assert (found["predicted"]["calls"], found["predicted"]["prefill_tokens"], found["schedule"]) == (0, 0, [])
    assert "3 rows make no call" in str(made)
    assert made.svg()
    assert made.mermaid()
    assert chain("a").run(ROWS, on=model, cache=tmp_path).counts.calls.calls == 0
