"""What nodes are to be fast at follows from what the outputs of a graph are wanted for (Parrot, section 5.2)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workflow.shapes import body, function, graph, llm, mapped, pick
from weft.testing.word_tokens import WordTokens
from weft.workflow.analysis.objectives import CallObjective, node_objectives
from weft.workflow.analysis.operators import unroll
from weft.workflow.analysis.statistics import Statistics
from weft.workflow.graph import canonical, graph_from_dict

LATENCY, THROUGHPUT = CallObjective("latency", None), CallObjective("throughput", None)


def objectives(raw: dict[str, Any], wanted: Any) -> dict[str, CallObjective]:
    tokens = WordTokens()
    return node_objectives(unroll(canonical(graph_from_dict(raw)), lambda model: tokens, Statistics(), "m"), wanted)


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
