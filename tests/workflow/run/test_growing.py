"""A graph that grows while it is evaluated, without an event loop."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.workflow.naive import evaluate
from tests.workflow.run.player import fake_answer
from tests.workflow.shapes import Json, body, graph, llm, loop, mapped, pick, text
from weft.workflow.analysis.objectives import CallObjective
from weft.workflow.criteria import LATENCY, THROUGHPUT, Criterion, deadline
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.nodes import AnyNode
from weft.workflow.graph.templates import Reference
from weft.workflow.run.frames import RowFailure
from weft.workflow.run.growing import GrowingState
from weft.workflow.run.instructions import CallModel, FindCost, RunLimits, Settled
from weft.workflow.run.objectives import SessionObjectives
from weft.workflow.run.order import CallHints


def nodes(*raw: Json) -> dict[str, AnyNode]:
    return {node.id: node for node in graph_from_dict({**graph(*raw), "inputs": []}).nodes}


def calls(state: GrowingState, most: int = 9) -> list[CallModel]:
    """The next calls, none of which has an earlier answer."""
    found = state.take(most)
    for each in found:
        if isinstance(each, FindCost):
            state.counted(each.task, None)
    found += state.take(most - sum(isinstance(each, CallModel) for each in found))
    return [each for each in found if isinstance(each, CallModel)]


def content(call: CallModel) -> Any:
    return call.request.body["messages"][-1]["content"]


CHAIN = nodes(llm("a", "Hi"), llm("b", "{{a}}!"), text("c", "{{b}}?"))


def test_a_node_begins_when_its_inputs_are_there() -> None:
    state = GrowingState()
    state.grow([CHAIN["a"]])
    state.grow([CHAIN["b"], CHAIN["c"]])
    (first,) = calls(state)
    assert content(first) == "Hi"
    state.answered(first.task, fake_answer(first.request))
    said = state.value(Reference("a"))
    instructions = state.take(9)
    assert Settled("a") in instructions
    (second,) = (each for each in instructions if isinstance(each, CallModel))
    assert content(second) == f"{said}!"
    assert state.unsettled == ("b", "c")
    state.answered(second.task, fake_answer(second.request))
    assert state.take(0) == [Settled("b"), Settled("c")]
    assert state.value(Reference("c")) == f"{state.value(Reference('b'))}?"


def test_a_node_that_comes_after_its_input_ended_runs() -> None:
    state = GrowingState()
    state.grow([CHAIN["a"]])
    (first,) = calls(state)
    state.answered(first.task, fake_answer(first.request))
    state.grow([CHAIN["b"]])
    assert len(calls(state)) == 1


def test_calls_leave_in_the_order_in_which_they_were_added() -> None:
    state = GrowingState()
    state.grow(nodes(llm("z", "1")).values())
    state.grow(nodes(llm("a", "2")).values())
    state.grow(nodes(llm("m", "3")).values())
    assert [content(call) for call in calls(state, 2)] == ["1", "2"]
    assert [content(call) for call in calls(state)] == ["3"]


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_reaches_all_that_depends_on_it_and_nothing_else(late: bool) -> None:
    state = GrowingState()
    added = [CHAIN["a"], *nodes(llm("other", "Hello")).values()]
    state.grow(added if late else [*added, CHAIN["b"], CHAIN["c"]])
    failing, other = calls(state)
    state.failed(failing.task, ValueError("no"), 0.0)
    state.answered(other.task, fake_answer(other.request))
    if late:
        state.grow([CHAIN["b"], CHAIN["c"]])
    failure = state.value(Reference("a"))
    assert isinstance(failure, RowFailure)
    assert failure.node == "a"
    assert state.value(Reference("c")) is failure
    assert isinstance(state.value(Reference("other")), str)


def test_equal_calls_in_flight_are_one() -> None:
    state = GrowingState()
    state.grow(nodes(text("t", "Hi"), llm("a", "{{t}}", temperature=0)).values())
    state.grow(nodes(llm("b", "Hi", seed=1), llm("c", "Hi", temperature=0)).values())
    sent = calls(state)
    assert [call.task.path for call in sent] == ["a", "b"]
    state.answered(sent[0].task, fake_answer(sent[0].request))
    assert state.value(Reference("a")) == state.value(Reference("c"))
    assert state.counts.calls.merged_calls == 1


def test_hints_go_with_the_request_and_are_no_part_of_its_key() -> None:
    bare, hinted = GrowingState(), GrowingState(hints=lambda site: CallHints({"session_id": site.label}))
    inside = body(llm("x", "{{i}}", temperature=0), out="x")
    added = nodes({"id": "l", "op": "list", "of": ["Hi"]}, mapped("m", "l", inside))
    for state in (bare, hinted):
        state.grow(added.values())
    (without,), (having,) = calls(bare), calls(hinted)
    assert without.request.key == having.request.key
    assert having.request.hinted == {**without.request.body, "session_id": "m.x"}


WHOLE = graph(
    text("q", "A b c"),
    pick("parts", "q", split=" "),
    mapped("notes", "parts", body(llm("note", "{{i}} of {{q}}", temperature=0), out="note")),
    llm("first", "{{notes.out}}", temperature=0),
    {**llm("second"), "messages": [{"chat": "first"}, {"role": "user", "content": "On."}], "temperature": 0},
    loop("again", {"s": "second"}, body(llm("r", "{{s}} {{q}}", temperature=0), s="r"), max_rounds=3),
    outputs={"again": "again.s", "notes": "notes.out", "second": "second"},
    inputs=[],
)
WHOLE["nodes"][3]["messages"][0]["content"] = "{{q}}"


@pytest.mark.parametrize("seed", range(20))
def test_a_grown_graph_gives_what_the_whole_one_gives(seed: int) -> None:
    draw = random.Random(seed)
    whole = graph_from_dict(WHOLE)
    state, left, open_calls = GrowingState(), list(whole.nodes), list[CallModel]()
    while left or open_calls or state.unsettled:
        if left and draw.random() < 0.4:
            count = draw.randint(1, len(left))
            state.grow(left[:count])
            left = left[count:]
        open_calls += calls(state, draw.randint(0, 3))
        if open_calls:
            call = open_calls.pop(draw.randrange(len(open_calls)))
            state.answered(call.task, fake_answer(call.request))
    found = {name: state.value(Reference(*reference_of(text))) for name, text in whole.outputs.items()}
    assert found == evaluate(whole, {})


def reference_of(text: str) -> tuple[str, tuple[str, ...]]:
    name, *path = text.split(".")
    return name, tuple(path)


def test_limits_hold_for_the_whole_session() -> None:
    state = GrowingState(RunLimits(calls=1))
    state.grow([CHAIN["a"]])
    (first,) = calls(state)
    state.answered(first.task, fake_answer(first.request))
    state.grow(nodes(llm("late", "Hello")).values())
    assert calls(state) == []
    failure = state.value(Reference("late"))
    assert isinstance(failure, RowFailure)
    assert "1 call " in str(failure.error)
    assert failure.node == "late"


MAP = body(llm("note", "map {{i}}"), out="note")
PAIR = nodes(
    llm("bulk", "bulk"),
    llm("one", "one"),
    llm("two", "two"),
    {"id": "parts", "op": "list", "of": ["x", "y"]},
    mapped("notes", "parts", MAP),
    llm("both", "{{one}} {{two}}"),
    {"id": "all", "op": "text", "template": "{{both}} {{bulk}}"},
)


def grown(*wanted: tuple[str, Criterion]) -> GrowingState:
    state = GrowingState()
    state.grow(PAIR[name] for name in ("bulk", "one", "two", "parts", "notes", "both", "all"))
    for number, (name, criterion) in enumerate(wanted):
        state.want(name, criterion, 100.0 + number)
    return state


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        ([], ["bulk", "one", "two", "map x", "map y"]),
        ([("bulk", THROUGHPUT)], ["one", "two", "map x", "map y", "bulk"]),
        ([("both", LATENCY)], ["one", "two", "bulk", "map x", "map y"]),
        ([("notes", LATENCY), ("bulk", THROUGHPUT)], ["map x", "map y", "one", "two", "bulk"]),
        ([("all", THROUGHPUT), ("notes", deadline(9))], ["map x", "map y", "bulk", "one", "two"]),
        ([("two", LATENCY), ("two", THROUGHPUT)], ["two", "bulk", "one", "map x", "map y"]),
    ],
)
def test_calls_leave_by_what_they_are_wanted_for(wanted: list[tuple[str, Criterion]], order: list[str]) -> None:
    assert [content(call) for call in calls(grown(*wanted))] == order


def test_objectives_are_those_of_what_is_still_to_come() -> None:
    state = grown(("both", LATENCY))
    one = state.objective("one")
    assert one is not None
    assert (one.name, one.group) == ("throughput", 0)
    for call in calls(state, 2):
        state.answered(call.task, fake_answer(call.request))
    state.want("all", deadline(8), 200.0)
    both, bulk = state.objective("both"), state.objective("bulk")
    assert both == CallObjective("latency")
    assert bulk == CallObjective("deadline", None, 208.0)
    assert state.objective("notes.note") is None


def test_objectives_are_deduced_once_for_all_that_is_wanted_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests may each ask for a value of a graph with thousands of nodes."""
    deduced: list[float] = []
    deduce = SessionObjectives._deduce

    def counted(self: SessionObjectives, now: float) -> None:
        deduced.append(now)
        deduce(self, now)

    monkeypatch.setattr(SessionObjectives, "_deduce", counted)
    state = grown(*[("all", deadline(100 - seconds)) for seconds in range(50)])
    assert len(calls(state, 1)) == 1
    assert len(deduced) == 1


def test_a_part_of_a_map_has_its_objective_and_the_earlier_deadline_counts() -> None:
    state = grown(("notes", deadline(9)), ("notes", deadline(20)), ("notes", deadline(3)))
    assert state.objective("notes.note") == CallObjective("deadline", None, 105.0)


def test_an_objective_of_the_call_s_own_takes_the_place_of_all_of_the_hint() -> None:
    state = GrowingState(hints=lambda site: CallHints({"objective": "deadline", "deadline_s": 3.0, "priority": 5}))
    state.grow(nodes(llm("a", "Hi", objective="latency", priority=1)).values())
    (call,) = calls(state)
    fields = {name: call.request.hinted.get(name) for name in ("objective", "deadline_s", "priority")}
    assert fields == {"objective": "latency", "deadline_s": None, "priority": 1}
