"""A run of this process holds so many bytes: of values of rows in progress, and of results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.workflow.run.test_driver import InstantBackend, collected
from tests.workflow.shapes import Json, body, function, graph, llm, mapped
from weft import ops
from weft.abi.errors import LimitExceeded, Unsupported
from weft.client import Client
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.api import stream
from weft.workflow.graph import graph_from_dict
from weft.workflow.run.bounds import EvaluationBudget
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.results import RowResult
from weft.workflow.run.state import RunState

ROWS = [{"q": str(row)} for row in range(8)]
WIDE = 20_000
CALLS: list[str] = []


def wide(text: str) -> str:
    CALLS.append(text)
    return text[:1] * WIDE


@weft.flow
def widened(q: Any) -> Any:
    return ops.function(wide, q)


@pytest.fixture
def model() -> Iterator[LLM]:
    CALLS.clear()
    with LLM.over(FakeEngine, byte_tokenizer()) as opened:
        yield opened


class WordyBackend(InstantBackend):
    """Answers with long texts."""

    async def complete(self, request: ModelRequest, started: Any) -> ModelAnswer:
        return (await super().complete(request, started))._replace(text="x" * WIDE)


async def given_list(x: str) -> list[str]:
    return [x[:1] * 100] * (WIDE // 100)


EACH: Json = {
    "functions": function("v", "given", x="{{i}}"),
    "answers": llm("v", "{{i}}"),
}


@pytest.mark.parametrize("kind", EACH)
def test_values_from_functions_and_models_count(kind: str) -> None:
    raw = graph(mapped("m", "q", body(EACH[kind], v="v")), outputs={"out": "m.v"})

    def done(max_bytes: int) -> tuple[Any, int]:
        budget = EvaluationBudget(max_bytes, "max_value_bytes")
        services = RunServices(WordyBackend(), {"given": given_list})
        state = RunState(graph_from_dict(raw), budget=budget)
        rows = enumerate([{"q": [str(item) for item in range(40)]}, {"q": ["1"]}])
        return asyncio.run(collected(Driver(state, rows, services, Concurrency(rows=1)))), budget.held_bytes

    failed, left = done(15 * WIDE)
    assert left == 0
    error = failed[0].failure.error
    assert isinstance(error, LimitExceeded)
    assert "max_value_bytes" in str(error)
    assert failed[1].failure is None
    enough, left = done(60 * WIDE)
    assert (enough[0].failure, left) == (None, 0)


def test_rows_past_the_bound_of_values_fail_and_name_it(model: LLM) -> None:
    @weft.flow
    def many(q: Any) -> Any:
        return ops.map(lambda item: ops.function(wide, item), q)

    rows = [{"q": [str(item) for item in range(30)]}, {"q": ["1"]}]
    found = many.run(rows, on=model, max_value_bytes=8 * WIDE, concurrency=Concurrency(rows=1))
    assert found[1].error is None
    assert found[0].error is not None
    assert found[0].error.kind == "limit_exceeded"
    assert "max_value_bytes" in found[0].error.message
    assert many.run(rows, on=model)[0].error is None


def test_a_run_whose_results_are_more_ends_and_names_the_bound(model: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(LimitExceeded) as caught:
        widened.run(ROWS, on=model, out=out, max_run_bytes=3 * WIDE + 1000)
    assert caught.value.param == "max_run_bytes"
    assert "max_run_bytes" in caught.value.message
    assert "61,000" in caught.value.message
    assert len(out.read_text().splitlines()) < len(ROWS)
    # What was computed is kept: with more room the same run goes on.
    results = widened.run(ROWS, on=model, out=out, max_run_bytes=10 * WIDE)
    assert [len(row["value"]) for row in results] == [WIDE] * len(ROWS)
    assert sorted(json.loads(line)["row"] for line in out.read_text().splitlines()) == list(range(len(ROWS)))
    assert len(CALLS) < 2 * len(ROWS)


def test_rows_that_are_read_one_by_one_are_not_held(model: LLM) -> None:
    rows = list(stream(widened.graph, ROWS, model, functions=widened.functions, max_run_bytes=1))
    assert len([row for row in rows if isinstance(row, RowResult)]) == len(ROWS)


def test_a_session_of_this_process_has_the_bound_of_values(model: LLM) -> None:
    with weft.session(on=model, max_value_bytes=3 * WIDE) as session:
        values = [ops.function(wide, str(number)) for number in range(6)]
        session.wait()
        kept, refused = 0, []
        for value in values:
            try:
                kept += len(value.get())
            except Exception as error:
                refused.append(str(error))
    assert 0 < kept < 3 * WIDE
    assert refused
    assert all("max_value_bytes" in each for each in refused)


def test_a_server_has_a_bound_of_values_of_its_own() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unsupported, match=r"workflows\.max_value_bytes"):
        widened.run(ROWS, on=client, max_value_bytes=10)
