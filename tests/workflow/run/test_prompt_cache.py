"""Answers that a run has from an earlier one: only those that can only be so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.workflow.run.named_server import named_server
from weft import ops
from weft.llm import LLM
from weft.workflow.actuals import CallCounts

ROWS = [{"q": str(row)} for row in range(3)]
OPTIONS: dict[str, Any] = {"threads": 1, "num_pages": 128, "max_context": 256, "dtype": "float32"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", **OPTIONS) as made:
        yield made


def calls(flow: Any, llm: LLM, cache: Path, rows: Any = ROWS) -> tuple[CallCounts, list[Any]]:
    results = flow.run(rows, llm, cache=cache)
    assert results.errors == []
    return results.counts.calls, [result.outputs for result in results]


def asking(text: str, **fields: Any) -> Any:
    return weft.flow(lambda q: ops.llm(f"{text} {q}", max_tokens=4, **fields))


def test_only_what_changed_is_computed_again(llm: LLM, tmp_path: Path) -> None:
    def chain(last: str) -> Any:
        def flow(q: Any) -> Any:
            first = ops.llm(f"Say {q}", max_tokens=4, temperature=0)
            second = ops.llm([first.chat, ops.user("More.")], max_tokens=4, seed=4, temperature=1)
            return ops.llm(f"{second} {last}", max_tokens=4, temperature=0)

        return weft.flow(flow)

    before, expected = calls(chain("a"), llm, tmp_path)
    assert (before.calls, before.cached_calls) == (9, 0)
    again, same = calls(chain("a"), llm, tmp_path)
    assert (again.calls, again.cached_calls, again.prompt_tokens) == (0, 9, 0)
    assert same == expected
    changed, _ = calls(chain("b"), llm, tmp_path)
    assert (changed.calls, changed.cached_calls) == (3, 6)


def test_hits_are_row_by_row(llm: LLM, tmp_path: Path) -> None:
    calls(asking("Say", temperature=0), llm, tmp_path, ROWS[:2])
    assert calls(asking("Say", temperature=0), llm, tmp_path)[0][:3] == (1, 0, 2)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1}, {"temperature": 0, "cache": False}])
def test_what_is_never_kept(llm: LLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    for _ in range(2):
        assert calls(asking("Say", **fields), llm, tmp_path)[0].calls == 3


@pytest.mark.parametrize("fields", [{"temperature": 0, "stop": "x"}, {"temperature": 0, "min_p": 0.1}, {"seed": 1}])
def test_every_field_is_in_the_key(llm: LLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    calls(asking("Say", temperature=0), llm, tmp_path)
    assert calls(asking("Say", **fields), llm, tmp_path)[0].cached_calls == 0


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "float64"}, {"generation_config": "none"}, {"max_context": 128}, {"reasoning_parser": "none"}],
)
def test_with_another_precision_or_setting_it_is_another_model(
    llm: LLM, tmp_path: Path, changed: dict[str, Any]
) -> None:
    calls(asking("Say", temperature=0), llm, tmp_path)
    with LLM("weft-tiny", **OPTIONS | changed) as other:
        assert calls(asking("Say", temperature=0), other, tmp_path)[0].cached_calls == 0


def test_another_model_at_an_address_gives_its_own_answers(tmp_path: Path) -> None:
    flow = asking("Say", temperature=0)
    with named_server() as server:

        def answers(**options: Any) -> tuple[list[Any], int]:
            results = flow.run(ROWS, server.url, cache=tmp_path, **options)
            return results.column("value"), results.counts.calls.cached_calls

        def cached() -> Any:
            return flow.explain(ROWS, on=server.url, cache=tmp_path).to_dict()["prompt_cache"]["rows"]

        assert answers() == (["one says"] * 3, 0)
        assert server.num_listed == 1
        assert (answers(), cached()) == ((["one says"] * 3, 3), 3)
        assert answers(model="two") == (["two says"] * 3, 0)
        server.model = "three"
        assert cached() == 0
        assert answers() == (["three says"] * 3, 0)
        server.model = "one"
        assert answers() == (["one says"] * 3, 3)


def test_a_call_that_names_its_model_has_the_answers_of_that_name(tmp_path: Path) -> None:
    with named_server() as server:
        asking("Say", temperature=0, model="mine").run(ROWS, server.url, cache=tmp_path)
        server.model = "two"
        results = asking("Say", temperature=0, model="mine").run(ROWS, server.url, cache=tmp_path)
        assert (results.column("value"), results.counts.calls.cached_calls) == (["mine says"] * 3, 3)
        other = asking("Say", temperature=0, model="yours").run(ROWS, server.url, cache=tmp_path)
        assert other.counts.calls.cached_calls == 0


def test_without_a_known_model_no_answer_is_kept(tmp_path: Path) -> None:
    flow = asking("Say", temperature=0, retries=0)
    for _ in range(2):
        results = flow.run(ROWS, "http://127.0.0.1:9", cache=tmp_path)
        assert {error.kind for error in results.errors} == {"engine_dead"}
