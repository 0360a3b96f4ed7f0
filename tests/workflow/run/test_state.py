"""A run gives what naive evaluation gives, whatever the order of events; failures stay in their row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.naive import NaiveRunner, fake_text
from tests.workflow.random_graphs import graphs
from tests.workflow.run.player import Player, fake_answer
from tests.workflow.shapes import Json, body, function, graph, llm, loop, mapped, pick, switch, text
from weft.abi.errors import EngineDead, InvalidRequest, LimitExceeded, Overloaded
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.values import RowError
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.instructions import CallFunction, CallModel, RowDone, RunLimits, RunProgram
from weft.workflow.run.order import CallSite
from weft.workflow.run.state import RunState


def naive(raw: Json, row: Json) -> dict[str, Any] | None:
    """None: an error. Models answer as those of plays do."""

    def model(node: Any, request: Any) -> str:
        return fake_text(request)

    try:
        named = {"measure": lambda **args: fake_text(["measure", None, args])}
        programs = {"agent": lambda args: fake_text(["agent", args])}
        return NaiveRunner(model=model, functions=named, programs=programs).run(graph_from_dict(raw), row)
    except RowError:
        return None


@settings(deadline=None, max_examples=150)
@given(graphs(), st.integers(0, 2**32))
def test_any_graph_in_any_order_of_events(raw: Json, seed: int) -> None:
    rows = [{"question": "What?", "document": "One. Two. Three."}, {"question": "x", "document": ""}]
    done = Player(graph_from_dict(raw), rows, seed=seed).play()
    assert len(done) == len(rows)
    for row, ended in zip(rows, done, strict=True):
        expected = naive(raw, row)
        if expected is not None:  # nodes that no output needs are not evaluated here, and their errors not seen
            assert ended.failure is None
            assert ended.outputs == expected


def play(raw: Json, rows: list[Json], **options: Any) -> Player:
    player = Player(graph_from_dict(raw), rows, **options)
    player.play()
    return player


def texts(player: Player) -> list[str]:
    """What the calls that were sent say, in order."""
    return [call.request.body["messages"][-1]["content"] for call in player.sent]


def paths(player: Player) -> set[str]:
    return {call.task.path for call in player.sent}


def broken_for(*words: str, error: Exception) -> Any:
    def answer(request: ModelRequest) -> ModelAnswer:
        if any(word in str(request.body) for word in words):
            raise error
        return fake_answer(request)

    return answer


def test_what_no_output_needs_is_not_evaluated() -> None:
    raw = graph(llm("dead", "dead"), llm("alive", "{{q}}"))
    assert texts(play(raw, [{"q": "alive"}])) == ["alive"]


def test_only_the_case_that_is_taken_and_what_it_needs() -> None:
    cases = switch("s", "q", a=body(llm("x", "{{early}}"), v="x"), b=body(llm("y", "{{late}}"), v="y"))
    raw = graph(llm("early"), llm("late"), cases)
    assert paths(play(raw, [{"q": "b"}])) == {"late", "s[b].y"}


def test_a_body_begins_before_all_that_it_needs_is_there() -> None:
    one, two = llm("one", "1 {{i}}"), llm("two", "2 {{one}} {{slow}}")
    raw = graph(llm("slow"), pick("parts", "q", split=","), mapped("m", "parts", body(one, two, v="two")))
    player = Player(graph_from_dict(raw), [], max_calls=100)
    player.state.open_row(0, {"q": "a,b"})
    assert {str(call.task) for call in player.state.take(100)} == {"0/slow", "0/m[0].one", "0/m[1].one"}


def begun(raw: Json, row: Json) -> set[str]:
    """Nodes that are asked for before anything has a value."""
    state = RunState(graph_from_dict(raw))
    state.open_row(0, row)
    return {each.task.path for each in state.take(100) if isinstance(each, (CallModel, CallFunction, RunProgram))}


WAITED = function("parts", "split_up", x="{{q}}")


@pytest.mark.parametrize("bound", ["item", "state"])
def test_a_body_does_not_begin_with_what_only_a_case_needs(bound: str) -> None:
    cases = switch("s", "q", a=body(llm("x", "{{early}}"), v="x"), b=body(llm("y", "{{late}}"), v="y"))
    inside = body(cases, text("t", "{{s.v}}{{needed}}"), state="t")
    raw = mapped("m", "parts", inside) if bound == "item" else loop("m", {"state": "parts"}, inside, max_rounds=1)
    whole = graph(WAITED, llm("early"), llm("late"), llm("needed"), raw)
    assert begun(whole, {"q": "b"}) == {"parts", "needed"}


@pytest.mark.parametrize(
    ("node", "is_asked"),
    [
        (function("f", "f", x="{{q}}") | {"pure": True}, True),
        (function("f", "f", x="{{q}}"), False),
        ({"id": "f", "op": "program", "program": "agent"}, False),
        (llm("f"), True),
    ],
)
def test_a_map_asks_ahead_for_what_does_nothing_else(node: Json, is_asked: bool) -> None:
    each = mapped("m", "parts", body(text("t", "{{i}}{{f}}"), v="t"))
    assert begun(graph(WAITED, node, each), {"q": ""}) == ({"parts", "f"} if is_asked else {"parts"})
    # So does a call that needs it, and a loop around the map.
    called = graph(WAITED, node, llm("a", "{{f}}"), mapped("m", "parts", body(text("t", "{{i}}{{a}}"), v="t")))
    assert begun(called, {"q": ""}) == ({"parts", "f"} if is_asked else {"parts"})
    rounds = loop("l", {"s": "parts"}, body(each, s="m.v"), max_rounds=2)
    assert begun(graph(WAITED, node, rounds), {"q": ""}) == ({"parts", "f"} if is_asked else {"parts"})
    # A loop has a round in any case.
    asked = loop("l", {"s": "parts"}, body(text("t", "{{s}}{{f}}"), s="t"), max_rounds=2)
    assert begun(graph(WAITED, node, asked), {"q": ""}) == {"parts", "f"}


def test_a_function_that_does_something_is_not_called_for_an_empty_list() -> None:
    empty: Json = {"id": "parts", "op": "data", "value": []}
    each = mapped("m", "parts", body(text("t", "{{i}}{{f}}"), v="t"))
    called: list[str] = []

    def noted(call: CallFunction) -> str:
        called.append(call.task.path)
        return "x"

    raw = graph(empty, function("f", "f", x="{{q}}"), each)
    assert play(raw, [{"q": ""}], function=noted).done[0].outputs == {"out": []}
    assert called == []
    raw["nodes"][0]["value"] = ["1", "2"]
    assert play(raw, [{"q": ""}], function=noted).done[0].outputs == {"out": ["1x", "2x"]}
    assert called == ["f"]


def test_a_failure_is_one_entry_of_its_row_and_nothing_of_others() -> None:
    nodes = llm("a", "A {{q}}"), text("b", "{{a}}"), llm("c", "C {{b}}"), llm("d", "D {{q}}")
    raw = graph(*nodes, outputs={"c": "c", "d": "d"})
    player = play(raw, [{"q": "good"}, {"q": "bad"}], answer=broken_for("A bad", error=InvalidRequest("no")))
    good, bad = (player.done[row] for row in (0, 1))
    assert set(good.outputs) == {"c", "d"}
    assert good.failure is None
    assert set(bad.outputs) == {"d"}
    assert bad.failure is not None
    assert (bad.failure.node, str(bad.failure.error)) == ("a", "no")
    counts = player.state.counts
    assert (counts.rows, counts.failed_rows, counts.calls.calls) == (2, 1, 4)
    assert {node: each.calls for node, each in counts.by_node.items()} == {"a": 1, "c": 1, "d": 2}


def test_of_several_items_that_fail_the_first_one_is_told() -> None:
    raw = graph(pick("parts", "q", split=","), mapped("m", "parts", body(llm("x", "Item {{i}}"), v="x")))
    answer = broken_for("Item 2", "Item 4", error=InvalidRequest("no"))
    for seed in range(5):
        player = play(raw, [{"q": "1,2,3,4"}], seed=seed, answer=answer)
        failure = player.done[0].failure
        assert failure is not None
        assert failure.node == "m[1].x"
        assert len(player.sent) == 4


def test_names_of_tasks_say_where_they_are() -> None:
    inner = mapped("m", "parts", body(llm("x", "{{i}}{{draft}}"), v="x"))
    rounds = loop("l", {"draft": "q"}, body(inner, function("j", "join", of="{{m}}"), draft="j"), max_rounds=2)
    player = play(graph(pick("parts", "q", split=","), rounds), [{"q": "a,b"}])
    assert paths(player) == {f"l#{number}.m[{item}].x" for number in (1, 2) for item in (0, 1)}


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=7), EngineDead("dead")])
def test_overloads_and_deaths_are_tried_again_after_a_pause(error: Exception) -> None:
    left = [2]

    def answer(request: ModelRequest) -> ModelAnswer:
        if left[0]:
            left[0] -= 1
            raise error
        return fake_answer(request)

    player = play(graph(llm("a", "{{q}}")), [{"q": "x"}], answer=answer)
    assert player.done[0].failure is None
    assert len(player.sent) == 3
    assert player.now == (14.0 if isinstance(error, Overloaded) else 1.5)


def test_tries_are_bounded_and_other_errors_get_none() -> None:
    for error, tries in ((EngineDead("dead"), 3), (InvalidRequest("no"), 1)):
        player = play(graph(llm("a", retries=2)), [{"q": ""}], answer=broken_for("", error=error))
        assert len(player.sent) == tries
        assert player.done[0].failure is not None
        assert player.done[0].failure.error is error


def test_functions_are_tried_again_as_their_node_says() -> None:
    calls = []

    def failing(call: Any) -> Any:
        calls.append(call)
        raise ValueError("no")

    raw = graph({**function("f", "mine", x="{{q}}"), "retries": 2})
    player = play(raw, [{"q": "x"}], function=failing)
    assert len(calls) == 3
    assert player.done[0].failure is not None


@pytest.mark.parametrize(("fields", "sent"), [({"temperature": 0}, 1), ({"seed": 3}, 1), ({}, 6), ({"top_p": 1}, 6)])
def test_equal_calls_in_flight_are_one_if_they_can_only_answer_alike(fields: Json, sent: int) -> None:
    raw = graph(llm("a", "same", **fields), llm("b", "same", **fields), outputs={"a": "a", "b": "b"})
    player = Player(graph_from_dict(raw), [], max_calls=100)
    for row in range(3):
        player.state.open_row(row, {"q": str(row)})
    done = player.play()
    assert len(player.sent) == sent
    assert player.state.counts.calls.merged_calls == 6 - sent
    assert [row.failure for row in done] == [None] * 3


@pytest.mark.parametrize("limits", [None, RunLimits(tokens=100_000)])
def test_equal_calls_are_tried_as_often_as_each_says(limits: RunLimits | None) -> None:
    calls = [llm(name, "same", temperature=0, retries=tries) for name, tries in (("a", 1), ("b", 2), ("c", 0))]
    left = [2]

    def answer(request: ModelRequest) -> ModelAnswer:
        if left[0]:
            left[0] -= 1
            raise EngineDead("dead")
        return fake_answer(request)

    raw = graph(*calls, outputs={"a": "a", "b": "b", "c": "c"})
    player = play(raw, [{"q": ""}], answer=answer, limits=limits)
    assert set(player.done[0].outputs) == {"a", "b"}
    assert [call.task.path for call in player.sent] == ["c", "b", "b"]
    assert player.now == 0.5 + 1.0
    counts = player.state.counts.calls
    assert (counts.calls, counts.merged_calls) == (1, 1)
    assert not player.state._equal


@pytest.mark.parametrize(("limits", "made"), [(RunLimits(calls=2), 2), (RunLimits(tokens=1), 0)])
def test_what_is_past_a_limit_fails_and_names_it(limits: RunLimits, made: int) -> None:
    player = play(graph(llm("a", "{{q}}")), [{"q": str(row)} for row in range(5)], limits=limits, max_calls=1)
    errors = [row.failure.error for row in player.done.values() if row.failure is not None]
    assert len(errors) == 5 - made
    params = {error.param for error in errors if isinstance(error, LimitExceeded)}
    assert params == {"calls" if limits.calls else "tokens"}


def test_calls_leave_in_the_order_that_is_given() -> None:
    raw = graph(llm("a", "a {{q}}"), llm("b", "b {{q}}"), outputs={"a": "a", "b": "b"})
    player = Player(graph_from_dict(raw), [], order=lambda site: (site.label, -site.row), max_calls=100)
    for row in range(3):
        player.state.open_row(row, {"q": str(row)})
    player.play()
    assert texts(player) == ["a 2", "a 1", "a 0", "b 2", "b 1", "b 0"]


def sites(raw: Json, row: Json, **options: Any) -> list[CallSite]:
    """Where the calls stand that are sent, in the order in which they become ready."""
    asked: list[CallSite] = []

    def order(site: CallSite) -> tuple[Any, ...]:
        asked.append(site)
        return ()

    play(raw, [row], order=order, **options)
    return asked


def test_the_order_is_told_the_rounds_of_loops() -> None:
    inner = loop("inner", {"x": "said"}, body(llm("say", "{{x}}"), x="say"), max_rounds=2)
    raw = graph(loop("outer", {"said": "q"}, body(inner, said="inner.x"), max_rounds=2))
    assert sites(raw, {"q": ""}) == [
        CallSite(0, "outer.inner.say", (outer, inner)) for outer in range(2) for inner in range(2)
    ]


def test_the_order_is_told_the_items_of_maps_and_they_come_by_number() -> None:
    raw = graph(pick("parts", "q", split=" "), mapped("each", "parts", body(llm("note", "{{i}}"), value="note")))
    words = [str(number) for number in range(12)]
    assert sites(raw, {"q": " ".join(words)}) == [CallSite(0, "each.note", (), (item,)) for item in range(12)]
    assert texts(play(raw, [{"q": " ".join(words)}], max_calls=1)) == words


def test_cases_with_equal_names_have_labels_of_their_own() -> None:
    cases = {name: body(llm("a", f"{name} {{{{q}}}}"), value="a") for name in ("x", "")}
    raw = graph(switch("which", "q", **cases))
    raw["nodes"][0]["default"] = body(llm("a", "other"), value="a")
    labels = {q: [site.label for site in sites(raw, {"q": q})] for q in ("x", "", "else")}
    assert labels == {"x": ["which[x].a"], "": ['which[""].a'], "else": ["which[].a"]}
    counts = play(raw, [{"q": "x"}, {"q": ""}]).state.counts.by_node
    assert set(counts) == {"which[x].a", 'which[""].a'}


def test_a_chain_may_be_longer_than_the_stack() -> None:
    nodes = [text("t0", "{{q}}"), *[text(f"t{n}", f"{{{{t{n - 1}}}}}.") for n in range(1, 5000)]]
    (done,) = Player(graph_from_dict(graph(*nodes)), [{"q": ""}]).play()
    assert done.outputs == {"out": "." * 4999}


def test_rows_leave_nothing_behind() -> None:
    nodes = llm("a", "{{q}}", temperature=0), pick("p", "a", split=" "), mapped("m", "p", body(v="i"))
    player = play(graph(*nodes), [{"q": str(row)} for row in range(50)])
    kept = {**vars(player.state), **vars(player.state._ledger)}
    left = {name: value for name, value in kept.items() if isinstance(value, (dict, set, list)) and value}
    assert set(left) == {"_by_node"}


def test_a_call_that_ends_after_its_row_leaves_nothing_behind() -> None:
    """A map asks for what its body needs from around it before its list is there, which may be empty."""
    used = mapped("m", "parts", body(text("t", "{{a}}{{i}}"), v="t"))
    empty = graph(llm("a", "{{q}}"), {"id": "parts", "op": "data", "value": []}, used)
    state = RunState(graph_from_dict(empty))
    state.open_row(0, {"q": ""})
    taken = state.take(10)
    [call] = [each for each in taken if isinstance(each, CallModel)]
    assert any(isinstance(each, RowDone) for each in taken)
    state.answered(call.task, fake_answer(call.request))
    assert state.counts.calls.calls == 1
    assert not state._ledger._open
    assert not state._ledger._traces


def test_an_answer_that_is_cut_within_its_json_says_so() -> None:
    raw = graph(llm("a", schema={"type": "object"}))
    player = play(raw, [{"q": ""}], answer=lambda request: ModelAnswer('{"x": ', "length"))
    assert player.done[0].failure is not None
    assert "max_tokens" in str(player.done[0].failure.error)


def test_outputs_are_json() -> None:
    raw = graph(llm("a", "{{q}}"), {"id": "l", "op": "list", "of": ["{{a}}", ["{{a}}"]]})
    assert json.dumps(play(raw, [{"q": ""}]).done[0].outputs)
