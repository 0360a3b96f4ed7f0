"""What nodes are to be fast at follows from what the outputs of a graph are wanted for (Parrot, section 5.2)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workflow.shapes import body, function, graph, llm, loop, mapped, pick
from weft.abi.errors import InvalidRequest
from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.objectives import CallObjective, WantedOutputs, node_objectives
from weft.workflow.analysis.operators import unroll
from weft.workflow.analysis.statistics import Statistics
from weft.workflow.graph import canonical, graph_from_dict

LATENCY, THROUGHPUT = CallObjective("latency", None), CallObjective("throughput", None)


def objectives(raw: dict[str, Any], wanted: Any, deadline_s: float | None = None) -> dict[str, CallObjective]:
    tokens = WordTokens()
    unrolled = unroll(canonical(graph_from_dict(raw)), lambda model: tokens, Statistics(), "m")
    return node_objectives(unrolled, WantedOutputs(wanted, deadline_s))


def test_the_example_of_figure_9() -> None:
    """Two latency-critical results of one call, which two stages of parallel calls feed."""
    raw = graph(
        *(llm(f"a{number}", f"{{{{q}}}} {number}") for number in range(2)),
        *(llm(f"b{number}", f"{{{{a0}}}} {{{{a1}}}} {number}") for number in range(3)),
        llm("third", "{{b0}} {{b1}} {{b2}}"),
        llm("one", "{{third}} 1"),
        llm("two", "{{third}} 2"),
        outputs={"one": "one", "two": "two"},
    )
    found = objectives(raw, "latency")
    assert [found[name] for name in ("one", "two", "third")] == [LATENCY] * 3
    assert {found[f"b{number}"] for number in range(3)} == {CallObjective("throughput", 1)}
    assert {found[f"a{number}"] for number in range(2)} == {CallObjective("throughput", 0)}


def test_the_calls_of_a_map_are_a_task_group() -> None:
    raw = graph(
        pick("parts", "q", split=";"),
        mapped("each", "parts", body(llm("note", "{{i}}"), value="note")),
        function("all", "join", of="{{each}}"),
        llm("end", "{{all}}"),
    )
    assert objectives(raw, "latency") == {"each.note": CallObjective("throughput", 0), "end": LATENCY}


def test_outputs_may_be_wanted_for_different_things() -> None:
    raw = graph(llm("a", "1 {{q}}"), llm("b", "2 {{q}}"), outputs={"a": "a", "b": "b"})
    assert objectives(raw, {"a": "latency"}) == {"a": LATENCY, "b": THROUGHPUT}
    assert objectives(raw, "throughput") == {"a": THROUGHPUT, "b": THROUGHPUT}


@pytest.mark.parametrize("wanted", [{"c": "latency"}, {"a": "speed"}])
def test_what_does_not_exist_is_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match=r"there is no output 'c'|'speed' is not an objective"):
        objectives(graph(llm("a", "{{q}}"), outputs={"a": "a"}), wanted)


CHAIN = graph(
    llm("a", "{{q}}"),
    llm("b", "{{a}}"),
    llm("c", "{{b}}"),
    llm("other", "o {{q}}"),
    outputs={"out": "c", "other": "other"},
)


def test_only_the_last_call_is_for_its_first_token() -> None:
    assert objectives(CHAIN, {"out": "ttft"}) == {
        "a": LATENCY,
        "b": LATENCY,
        "c": CallObjective("ttft"),
        "other": THROUGHPUT,
    }


def test_calls_have_a_part_of_the_deadline_by_their_stage() -> None:
    found = objectives(CHAIN, {"out": "deadline", "other": "batch"}, 60.0)
    parts = {"a": 20.0, "b": 40.0, "c": 60.0}
    assert found == {name: CallObjective("deadline", None, part) for name, part in parts.items()} | {
        "other": CallObjective("batch")
    }


def test_what_only_batch_needs_is_for_batch() -> None:
    raw = graph(llm("a", "{{q}}"), llm("b", "{{a}}"), llm("c", "{{a}} c"), outputs={"b": "b", "c": "c"})
    batch = CallObjective("batch")
    assert objectives(raw, {"b": "batch"}) == {"a": THROUGHPUT, "b": batch, "c": THROUGHPUT}
    assert objectives(raw, "batch") == {"a": batch, "b": batch, "c": batch}
    assert objectives(raw, {"b": "batch", "c": "deadline"}, 4.0)["a"] == CallObjective("deadline", None, 2.0)


def test_the_calls_of_a_loop_have_one_objective() -> None:
    inner = body(llm("more", "{{x}}"), pick("done", "more", matches="END"), x="more")
    raw = graph(loop("l", {"x": "q"}, inner, until="done", max_rounds=3), outputs={"out": "l.x"})
    for wanted, deadline_s in (("latency", None), ("deadline", 9.0), ("batch", None)):
        assert objectives(raw, wanted, deadline_s)["l.more"] == CallObjective(wanted, None, deadline_s)


@pytest.mark.parametrize(
    ("wanted", "deadline_s", "said"),
    [
        ("deadline", None, "needs deadline_s"),
        ({"out": "deadline"}, -1.0, "must be in"),
        ("latency", 5.0, "objective deadline alone"),
    ],
)
def test_a_deadline_and_its_seconds_come_together(wanted: Any, deadline_s: float | None, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        objectives(CHAIN, wanted, deadline_s)
