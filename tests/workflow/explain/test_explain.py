"""What people see of a plan."""

from __future__ import annotations

from typing import Any

from tests.workflow.planner.analysed import words
from tests.workflow.planner.test_plan import ENGINE, FORWARD, planned
from tests.workflow.shapes import body as body_of
from tests.workflow.shapes import graph, llm, loop, text
from weft.workflow.explain.report import Explanation
from weft.workflow.frontend.workflow import Workflow
from weft.workflow.graph import graph_from_dict
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planning import ASSUMED_KV_TOKENS

RAW = graph(
    llm("pro", f"{words(30)} {{{{q}}}}", temperature=0),
    llm("same", f"{words(30)} {{{{q}}}}", temperature=0),
    {"id": "reply", "op": "llm", "messages": [{"chat": "pro"}, {"role": "user", "content": "But: {{same}}"}]},
    text("unused", "{{q}}"),
    outputs={"reply": "reply"},
)


def explanation(raw: dict[str, Any] = RAW, rows: Any = 12, **options: Any) -> Explanation:
    return Explanation(graph_from_dict(raw), planned(raw, rows, **options))


def test_each_part_of_the_text_is_there() -> None:
    said = str(explanation(engines=[PlanEngine(model="m", kv_tokens=8192, forward=FORWARD)]))
    for part in (
        "inputs: q",
        "  prune: removed unused",
        "  merge_duplicates: merged same into pro",
        "      {{q}}",
        "rows 0-11: pro",
        "computes ",
        "row by row it would be ",
        "takes about ",
    ):
        assert part in said
    (of_all,) = (line.split() for line in said.splitlines() if line.split()[:1] == ["all"])
    assert of_all[1] == "24"


def test_figures_are_those_of_the_plan() -> None:
    made = explanation()
    assert made.to_dict() == made.plan.to_dict()
    assert f"computes {made.plan.predicted.prefill_tokens:,} prompt tokens" in str(made)
    assert "takes about" not in str(made)  # no profile


def test_long_lists_are_cut() -> None:
    many = [llm(f"n{number}", f"{words(number + 2, f'w{number}_')} {{{{q}}}}") for number in range(60)]
    raw = graph(*many, outputs={f"n{number}": f"n{number}" for number in range(60)})
    said = str(explanation(raw, 3))
    assert " more lines" in said
    assert "  n59 " in said, "the figures of each node are there"


def test_mermaid_draws_what_needs_what() -> None:
    raw = graph(
        loop("again", {"x": "q"}, body_of(llm("say", "{{x}}"), x="say"), max_rounds=2),
        llm("end", "{{again}}"),
    )
    drawn = explanation(raw, engines=[ENGINE]).mermaid().splitlines()
    assert drawn[0] == "flowchart TD"
    assert '  n0["again.say × 2<br/>256 tokens"]' in drawn
    assert "  n0 --> n0" in drawn
    assert "  n0 --> n1" in drawn
    assert "  n0 ==> n1" in explanation(RAW).mermaid()


def test_a_workflow_explains_itself_for_a_server() -> None:
    made = Workflow(graph_from_dict(RAW)).explain(
        5, on="http://127.0.0.1:1/v1", statistics={"q": {"output_tokens": 40}}
    )
    assert made.plan.predicted.calls == 10
    assert [engine.kv_tokens for engine in made.plan.engines] == [ASSUMED_KV_TOKENS]
