"""Graphs of strangers: loops and maps without calls, texts that double. What they may cost is bounded and counted."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.random_graphs import graphs
from tests.workflow.run.player import Player
from tests.workflow.run.test_driver import InstantBackend, collected
from tests.workflow.shapes import Json, body, graph, llm, loop, mapped, pick, text
from weft.abi.errors import LimitExceeded
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.values import MAX_NESTING, TOO_DEEP, RowError, is_too_deep
from weft.workflow.run import bounds
from weft.workflow.run.bounds import ITEM_BYTES, EvaluationBudget, copied_bytes
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.instructions import RowDone, RunLimits
from weft.workflow.run.state import RunState
from weft.workflow.run.turns import LoopTurns

SETTING = "workflows.max_value_bytes"


def rounds(depth: int, each: int) -> Json:
    """A graph of loops in loops, without a call."""
    inside, outputs = text("t", f"{{{{v{depth}}}}}"), {f"v{depth}": "t"}
    for level in range(depth, 0, -1):
        name = f"v{level - 1}" if level > 1 else "q"
        inside = loop(f"l{level}", {f"v{level}": name}, body(inside, **outputs), max_rounds=each)
        outputs = {f"v{level - 1}": f"l{level}.v{level}"}
    return graph(inside, outputs={"out": "l1.v1"})


ENDLESS = rounds(5, 1000)
PAIRS = graph(mapped("m", "q", body(mapped("n", "q", body(text("t", "{{i}}"), t="t")), n="n.t")), outputs={"out": "m"})


def run(raw: Json, given: list[Any], budget: EvaluationBudget, rows: int = 1000) -> dict[int, RowDone]:
    state = RunState(graph_from_dict(raw), budget=budget)
    numbered = enumerate({"q": row} for row in given)
    return asyncio.run(collected(Driver(state, numbered, RunServices(InstantBackend()), Concurrency(rows=rows))))


@pytest.mark.parametrize(("raw", "q"), [(ENDLESS, "x"), (PAIRS, list(range(10_000)))])
def test_a_row_evaluates_so_many_nodes(raw: Json, q: Any) -> None:
    budget = EvaluationBudget(1 << 30, SETTING, max_evaluations=5000)
    failed = run(raw, [q, q], budget)
    for done in failed.values():
        assert done.failure is not None
        assert isinstance(done.failure.error, LimitExceeded)
        assert done.failure.error.param == "evaluations"
    assert budget.held_bytes == 0


def test_what_a_graph_may_evaluate_it_evaluates() -> None:
    assert run(rounds(2, 30), ["x"], EvaluationBudget(1 << 20, SETTING, 2000))[0].outputs == {"out": "x"}
    pairs = run(PAIRS, [list(range(40))], EvaluationBudget(1 << 20, SETTING, 8000))[0]
    assert pairs.outputs["out"] == [[str(i) for i in range(40)]] * 40


@pytest.mark.parametrize("raw", [ENDLESS, PAIRS])
def test_a_turn_evaluates_a_bounded_number_of_nodes(raw: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState(graph_from_dict(raw), budget=EvaluationBudget(1 << 30, SETTING))
    calls = 0
    evaluate = state._next

    def counted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        evaluate(*args)

    monkeypatch.setattr(state, "_next", counted)
    state.open_row(0, {"q": list(range(10_000))})
    for _ in range(20):
        assert state.work()
        assert 0 < calls <= 3 * bounds.TURN_COST
        calls = 0
        state.begin_turn()


def test_other_tasks_run_between_turns_and_a_run_can_be_cancelled_there() -> None:
    async def check() -> None:
        budget = EvaluationBudget(1 << 30, SETTING)
        state = RunState(graph_from_dict(ENDLESS), budget=budget)
        driver = Driver(state, enumerate([{"q": "x"}]), RunServices(InstantBackend()))
        task = asyncio.create_task(collected(driver))
        for _ in range(50):
            await asyncio.sleep(0)
        assert budget.held_bytes
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert budget.held_bytes == 0

    asyncio.run(check())


def test_large_values_take_a_turn() -> None:
    """A hundred texts of 8 MiB would take seconds in one turn."""
    names = [f"t{number}" for number in range(100)]
    whole = graph(*(text(name, f"{name} {{{{q}}}}") for name in names), outputs={name: name for name in names})
    state = RunState(graph_from_dict(whole), budget=EvaluationBudget(1 << 30, SETTING))
    state.open_row(0, {"q": "x" * (8 << 20)})
    turns = 1
    while state.work():
        turns += 1
        state.begin_turn()
    assert turns >= 100


def test_texts_that_double_end_at_the_budget() -> None:
    nodes = [text("t0", "{{q}}{{q}}"), *(text(f"t{n}", f"{{{{t{n - 1}}}}}{{{{t{n - 1}}}}}") for n in range(1, 12))]
    doubling = graph(*nodes)
    budget = EvaluationBudget(1 << 20, SETTING)
    done = run(doubling, ["x" * 1000, "x"], budget, rows=2)
    failure = done[0].failure
    assert failure is not None
    assert isinstance(failure.error, LimitExceeded)
    assert SETTING in failure.error.message
    assert done[1].outputs == {"out": "x" * 4096}
    assert budget.held_bytes == 0


LISTED = {"id": "n", "op": "list", "of": ["{{v}}"]}


@pytest.mark.parametrize(("node", "output"), [(LISTED, "n"), (mapped("n", "q", body(text("t"), w="v")), "n.w")])
def test_a_value_that_a_loop_nests_fails_its_row_alone(node: Json, output: str) -> None:
    def whole(max_rounds: int) -> Json:
        return graph(loop("l", {"v": "q"}, body(node, v=output), max_rounds=max_rounds), outputs={"out": "l.v"})

    budget = EvaluationBudget(1 << 30, SETTING)
    failures = [done.failure for done in run(whole(600), [["x"], ["y"]], budget).values()]
    for failure in failures:
        assert failure is not None
        assert isinstance(failure.error, RowError)
        assert (failure.node, failure.error.message) == (f"l#{MAX_NESTING}.n", TOO_DEEP)
    outputs = run(whole(MAX_NESTING - 1), [["x"]], budget)[0].outputs["out"]
    assert not is_too_deep(outputs)
    assert is_too_deep([outputs])
    assert budget.held_bytes == 0


def test_lists_that_maps_double_are_bounded() -> None:
    node = mapped("n", "q", body(text("t"), w="v"))
    doubling = graph(loop("l", {"v": "q"}, body(node, v="n.w"), max_rounds=100), outputs={"out": "l.v"})
    done = run(doubling, [["x", "y"]], EvaluationBudget(1 << 30, SETTING))[0]
    assert done.failure is not None
    assert "Mi characters as text" in str(done.failure.error)


def test_arguments_that_templates_make_count() -> None:
    called = {"id": "f", "op": "function", "name": "count", "args": {"x": "{{q}}: {{i}}"}}
    whole = graph(pick("parts", "q", split=","), mapped("m", "parts", body(called, v="f")))
    state = RunState(graph_from_dict(whole), budget=EvaluationBudget(1 << 20, SETTING))
    state.open_row(0, {"q": ",".join("x" * 1000 for _ in range(100))})
    state.work_all()
    asked = state.take(1000)
    assert 0 < len(asked) <= 10, "each has a text of its own with 100 kB"
    assert state._costs._budget is not None
    assert state._costs._budget.held_bytes <= 1 << 20
    state.close()


def test_arguments_that_are_values_as_they_are_count_as_their_copies() -> None:
    templates = {"made": "{{a}}!", "same": "{{a}}", "constant": "x" * 100, "items": ["{{list}}", 1]}
    filled = {"made": "b" * 100, "same": "b" * 99, "constant": "x" * 100, "items": [["y" * 50, {"k": "z"}], 1]}
    assert copied_bytes(templates, filled) == sys.getsizeof("b" * 100) + ITEM_BYTES * (4 + 2 + 2 + 1)


def test_rounds_hold_what_they_pass_on_and_no_more() -> None:
    grown = body(text("t", "{{v}}x"), v="t")
    whole = graph(loop("l", {"v": "q"}, grown, max_rounds=1000), outputs={"out": "l.v"})
    budget = EvaluationBudget(64 << 10, SETTING)
    assert run(whole, ["y" * 5000], budget)[0].outputs["out"] == "y" * 5000 + "x" * 1000
    assert budget.held_bytes == 0


def test_rows_wait_for_room() -> None:
    """With values that fill half of the budget a row runs alone; none fails."""
    budget = EvaluationBudget(1 << 20, SETTING)
    most = 0

    class Watching(InstantBackend):
        async def complete(self, *args: Any) -> Any:
            nonlocal most
            most = max(most, state.num_rows)
            return await super().complete(*args)

    state = RunState(graph_from_dict(graph(text("t", "{{q}}!"), llm("a", "{{t}}"))), budget=budget)
    rows = enumerate({"q": "x" * (300 << 10)} for _ in range(6))
    done = asyncio.run(collected(Driver(state, rows, RunServices(Watching()), Concurrency(rows=6))))
    assert [each.failure for each in done.values()] == [None] * 6
    assert most == 1


def test_results_that_nobody_has_taken_count() -> None:
    """Rows without calls end as soon as they begin: not all of them before the first result is taken."""
    budget = EvaluationBudget(1 << 20, SETTING)
    state = RunState(graph_from_dict(graph(text("t", "{{q}}!"))), budget=budget)
    rows = enumerate({"q": "x" * (100 << 10)} for _ in range(100))

    async def check() -> None:
        driver = Driver(state, rows, RunServices(InstantBackend()))
        results = driver.results()
        first = await anext(results)
        assert isinstance(first, RowDone)
        assert state.num_opened < 10
        assert len([first] + [done async for done in results]) == 100

    asyncio.run(check())
    assert budget.held_bytes == 0


def test_a_text_has_so_many_parts() -> None:
    done = run(graph(pick("p", "q", split="a")), ["a" * 300_000], EvaluationBudget(1 << 30, SETTING))
    assert done[0].failure is not None
    assert "parts" in str(done[0].failure.error)


def test_calls_that_a_limit_refuses_take_turns() -> None:
    whole = graph(mapped("m", "q", body(llm("a", "{{i}}"), a="a")))
    player = Player(graph_from_dict(whole), [{"q": list(range(2000))}], max_calls=4, limits=RunLimits(calls=0))
    (done,) = player.play()
    assert done.failure is not None


@settings(deadline=None, max_examples=60)
@given(graphs(), st.integers(0, 2**32))
def test_no_graph_leaves_anything_in_the_budget(raw: Json, seed: int) -> None:
    budget = EvaluationBudget(1 << 30, SETTING)
    rows = [{"question": "What?", "document": "One. Two. Three."}, {"question": "x", "document": ""}]
    player = Player(graph_from_dict(raw), rows, seed=seed)
    player.state = RunState(graph_from_dict(raw), budget=budget)
    player.play()
    assert budget.held_bytes == 0


def test_tenants_take_turns() -> None:
    async def check() -> None:
        turns, order = LoopTurns(), list[str]()

        async def run(tenant: str) -> None:
            for _ in range(3):
                await turns.next(tenant)
                order.append(tenant)

        cancelled = asyncio.create_task(run("alice"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*(run("alice") for _ in range(4)), run("bob"))
        assert order[:6].count("bob") == 3
        assert len(order) == 15

    asyncio.run(check())
