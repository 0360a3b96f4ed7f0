"""Every example of a workflow runs, and gives the same in the server's form, JSON."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.llm import LLM

FOLDER = Path(__file__).parents[2] / "examples/workflows"
LONG = "The lighthouse on the hill was built by sailors. " * 30
ROWS: dict[str, dict[str, Any]] = {
    "map_reduce": {"question": "Why is the sky blue?"},
    "debate": {"question": "Should cities ban cars?"},
    "reflection": {"question": "What makes bread rise?"},
    "iterative": {"first": "Good.", "second": "Too loud.", "third": "Fine."},
    "parallel_chains": {"document": LONG},
    "by_parts": {"document": LONG, "question": "Who built it?"},
    "in_a_chain": {"beginning": "A hill.", "middle": "Sailors.", "end": "A light.", "question": "Who built it?"},
    "coding": {"task": "a snake game"},
    "chat_search": {"question": "How tall is the tower?"},
    "verdict_loop": {"topic": "a lighthouse"},
    "person": {"letter": "May I visit the tower?"},
    "trading": {"prices": "3, 4, 5", "posts": "Nice.", "news": "A new tower.", "fundamentals": "It earns money."},
}


def found() -> dict[str, weft.Workflow]:
    flows: dict[str, weft.Workflow] = {}
    for path in sorted(FOLDER.glob("*.py")):
        flows |= {key: value for key, value in runpy.run_path(str(path)).items() if isinstance(value, weft.Workflow)}
    return flows


FLOWS = found()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", threads=1, dtype="float32", num_pages=2048, max_context=1024) as made:
        yield made


async def approve(instruction: Any) -> Any:
    return {"approved": instruction.task.row == 0, "note": "be brief"}


def test_each_is_run() -> None:
    assert set(FLOWS) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_an_example_runs_and_so_does_its_json(name: str, llm: LLM) -> None:
    flow = FLOWS[name]
    results = flow.run([ROWS[name]] * 2, llm, external=approve)
    assert results.errors == []
    assert all(value for result in results for value in result.outputs.values())
    loaded = weft.Workflow.load(flow.to_dict())
    assert loaded.digest == flow.digest
    # With what the first run measured, so each figure must be of a node that the optimised graph has.
    known = {"statistics": results.statistics, "functions": flow.functions}
    again = loaded.run([ROWS[name]] * 2, llm, external=approve, **known)
    assert results.statistics
    greedy = name not in ("by_parts", "in_a_chain", "verdict_loop")
    assert not greedy or [result.outputs for result in again] == [result.outputs for result in results]


def test_the_desk_shares_what_its_agents_have_in_common(llm: LLM) -> None:
    counts = FLOWS["trading"].run([ROWS["trading"]], llm).counts
    assert counts.calls.cached_tokens > counts.calls.prompt_tokens / 2


def test_engineers_work_in_a_session(llm: LLM) -> None:
    build = runpy.run_path(str(FOLDER / "engineers.py"))["build"]
    made = build("a snake game", llm)
    assert list(made) == ["plan", "code", "tests"]
    assert all(isinstance(text, str) and text for text in made.values())
    assert build("a snake game", llm) == made
