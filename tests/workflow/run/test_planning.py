"""Plans of runs: samples first, late rows, what cannot be planned, and what the order saves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.workflow.planner.analysed import words
from tests.workflow.run.caching_backend import CachingBackend
from tests.workflow.shapes import Json, body, graph, llm, loop, pick, switch
from weft.abi.errors import InvalidRequest
from weft.testing.word_tokens import WordTokens
from weft.workflow.graph import graph_from_dict
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.backend import CallProgress
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.instructions import RowDone
from weft.workflow.run.order import row_by_row
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.planning import PlanSources, RunPlanner
from weft.workflow.run.state import RunState

KV_TOKENS = 600


async def at_once(make: Callable[[Any], Any], rows: Any) -> Any:
    """Plans are there before anything else happens, so that a run is the same each time."""
    return make(rows)


class PlannedRun:
    """A run on a caching backend."""

    def __init__(
        self, raw: Json, kv_tokens: int = KV_TOKENS, model: str = "m", engines: int = 1, **statistics: Mapping[str, Any]
    ):
        read = graph_from_dict(raw)
        tokens = WordTokens()
        self.backend = CachingBackend(kv_tokens)
        self.order = PlannedOrder(row_by_row(read))
        self.state = RunState(read, self.order)
        served = [PlanEngine("m", kv_tokens, page_size=4, replica=replica) for replica in range(engines)]
        sources = PlanSources(lambda name: tokens, served, model)
        self.planner = RunPlanner(read, self.order, sources, statistics, at_once)
        self.plans: list[list[int]] = []
        """The rows of each plan."""
        put = self.order.put

        def noted(rows: Mapping[int, int], ranks: Any, in_progress: Any) -> None:
            self.plans.append(list(rows))
            put(rows, ranks, in_progress)

        self.order.put = noted  # type: ignore[method-assign]

    def run(self, given: Iterable[Json], *, is_planned: bool = True, **at_once: int) -> dict[int, Any]:
        """The outputs of all rows."""
        planner = self.planner if is_planned else None
        services = RunServices(self.backend)
        made = Driver(self.state, enumerate(given), services, Concurrency(**at_once), planner=planner)

        async def collected() -> dict[int, Any]:
            done = [each async for each in made.results()]
            return {each.row: each.outputs for each in done if isinstance(each, RowDone)}

        return asyncio.run(collected())


def agent(name: str, role: str, user: str) -> Json:
    messages = [{"role": "system", "content": words(60, role)}, {"role": "user", "content": user}]
    return {"id": name, "op": "llm", "messages": messages, "max_tokens": 40}


def map_reduce() -> Json:
    experts = [agent(f"expert{number}", f"role{number}_", "{{q}}") for number in range(8)]
    answers = " ".join(f"{{{{expert{number}}}}}" for number in range(8))
    return graph(*experts, agent("summary", "summary_", f"{{{{q}}}} {answers}"))


def trading(traders: int = 3) -> Json:
    """Analysts, a debate, and for each trader a round of critics and a judge; then the fund manager."""
    analysts = [agent(f"analyst{number}", f"analyst{number}_", f"{{{{q}}}} {number}") for number in range(3)]
    reports = " ".join(f"{{{{analyst{number}}}}}" for number in range(3))
    debate = [
        agent("bull", "bull_", f"{{{{q}}}} {reports}"),
        agent("bear", "bear_", f"{{{{q}}}} {reports} {{{{bull}}}}"),
    ]
    chains = []
    for trader in range(traders):
        chains.append(agent(f"trader{trader}", f"trader{trader}_", "{{q}} {{bull}} {{bear}}"))
        critics = [agent(f"{name}{trader}", name, f"{{{{trader{trader}}}}}") for name in ("risky", "safe", "neutral")]
        said = " ".join(f"{{{{{critic['id']}}}}}" for critic in critics)
        chains += [*critics, agent(f"judge{trader}", "judge_", f"{{{{trader{trader}}}}} {said}")]
    judged = " ".join(f"{{{{judge{trader}}}}}" for trader in range(traders))
    return graph(*analysts, *debate, *chains, agent("fund", "fund_", judged))


def rows_of(count: int) -> list[Json]:
    return [{"q": words(15, f"row{row}_")} for row in range(count)]


@pytest.mark.parametrize("raw", [map_reduce(), trading()], ids=["map-reduce", "trading"])
def test_the_order_of_a_plan_computes_fewer_tokens_than_row_by_row(raw: Json) -> None:
    """One row's roles do not fit into the cache beside its prompts; those of a part of the schedule do."""
    planned, plain = PlannedRun(raw), PlannedRun(raw)
    rows = rows_of(12)
    assert planned.run(rows) == plain.run(rows, is_planned=False)
    assert planned.planner.failure is None
    assert planned.planner.rounds.num_plans >= 2
    assert planned.backend.prefill_tokens < 0.8 * plain.backend.prefill_tokens


def test_a_sample_of_the_rows_runs_first_and_its_figures_make_the_next_plan() -> None:
    run = PlannedRun(graph(llm("a", "{{q}}"), llm("b", "{{a}} {{q}}")))
    run.run(rows_of(25), waiting_calls=1, calls=1)
    sample = run.plans[0]
    assert sample == [0, 12]
    assert run.plans[1] == [row for row in range(25) if row not in sample]
    # The last one was made when the sample had ended, for the rows that had not started.
    assert set() < set(run.plans[2]) < set(run.plans[1])
    assert run.backend.sent[:2] == [rows_of(25)[row]["q"] for row in sample]
    assert run.planner.rounds.known == {name: {"output_tokens": 20} for name in "ab"}


@pytest.mark.parametrize(("calls", "waiting_calls", "most"), [(3, 10, 3), (100, 2, 2)])
@pytest.mark.parametrize("engines", [1, 2])
def test_calls_are_bounded_for_each_engine(calls: int, waiting_calls: int, most: int, engines: int) -> None:
    run = PlannedRun(graph(llm("a", "{{q}}")), engines=engines)
    complete, at_once = run.backend.complete, []

    async def counted(request: ModelRequest, started: CallProgress) -> ModelAnswer:
        run_calls.add(request.body["messages"][-1]["content"])
        at_once.append(len(run_calls))
        try:
            return await complete(request, started)
        finally:
            run_calls.remove(request.body["messages"][-1]["content"])

    run_calls: set[str] = set()
    run.backend.complete = counted  # type: ignore[method-assign]
    run.run(rows_of(20), calls=calls, waiting_calls=waiting_calls)
    assert max(at_once) == most * engines


def test_known_figures_need_no_sample() -> None:
    run = PlannedRun(graph(llm("a", "{{q}}")), a={"output_tokens": 3})
    run.run(rows_of(25))
    assert run.plans == [list(range(25))]


def test_rows_that_come_late_are_planned_with_those_that_have_not_started() -> None:
    run = PlannedRun(graph(llm("a", "{{q}}")), a={"output_tokens": 3})
    done = run.run(rows_of(40), rows=8, waiting_calls=1, calls=1)
    assert sorted(done) == list(range(40))
    assert run.plans[0] == list(range(8))
    assert len(run.plans) > 2
    late = [row for plan in run.plans[1:] for row in plan if row >= 8]
    assert set(late) <= set(range(8, 40))
    assert any(row >= 8 for row in run.plans[1])


def test_what_cannot_be_planned_runs_row_by_row() -> None:
    run = PlannedRun(graph(llm("a", "{{q}}", model="unknown")))
    rows = rows_of(3)
    assert sorted(run.run(rows)) == [0, 1, 2]
    assert "unknown" in str(run.planner.failure)
    assert run.backend.sent == [row["q"] for row in rows]


def test_a_plan_that_fails_for_a_mistake_of_ours_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("weft.workflow.run.plan_rounds.make_plan", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        PlannedRun(graph(llm("a", "{{q}}"))).run(rows_of(2))


def test_what_runs_measure_of_loops_lists_and_cases() -> None:
    raw = graph(
        pick("parts", "q", split=" "),
        {"id": "each", "op": "map", "over": "parts", "item": "i", "body": body(llm("note", "{{i}}"), v="note")},
        loop("again", {"x": "q"}, body(llm("say", "{{x}}"), pick("end", "q", matches="a"), x="say"), until="end"),
        switch("which", "q", **{"a b": body(llm("c"), v="c"), "x": body(llm("d"), v="d")}),
        outputs={"a": "each.v", "b": "again.x", "c": "which.v"},
    )
    run = PlannedRun(raw)
    run.run([{"q": "a b"}])
    assert run.state.measured() == {
        "each.note": {"output_tokens": 20},
        "each": {"items": 2},
        "again.say": {"output_tokens": 20},
        "again": {"rounds": 1},
        "which[a b].c": {"output_tokens": 20},
        "which": {"shares": {"cases[a b]": 1}},
    }


def test_statistics_of_nothing_are_refused() -> None:
    from weft.workflow.api import GraphRun

    with pytest.raises(InvalidRequest, match="b"):
        GraphRun(graph_from_dict(graph(llm("a", "{{q}}"))), [{"q": ""}], "http://nowhere", {"statistics": {"b": {}}})
