"""An explanation: a plan with the graph that it is of, and what a run did, in each form in which it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from weft.workflow.actuals import CachedFigures, RunActuals
from weft.workflow.explain.actual import actual_dict, timeline
from weft.workflow.explain.mermaid import graph_mermaid, mermaid
from weft.workflow.explain.svg import Bar, timeline_svg
from weft.workflow.explain.text import Explained, explained
from weft.workflow.graph.digest import digest
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.planner.plan import Plan

ExplainFormat = Literal["text", "json", "mermaid", "svg"]


class Explanation:
    """What a run would do, or did. As text it is for people; `to_dict` is for programs."""

    def __init__(
        self,
        graph: WorkflowGraph,
        plan: Plan | None,
        actual: RunActuals | None = None,
        *,
        passes: Sequence[Mapping[str, Any]] = (),
        why_no_plan: str = "",
        keeps_kv: bool = True,
        cached: CachedFigures | None = None,
    ):
        """`graph` is that of the user, before the optimiser. Without a plan, `passes` say what the optimiser did, and
        `why_no_plan` why there is none. `keeps_kv`: the engines keep KV on request. `cached`
        is what the prompt cache has, where it was asked."""
        self.graph = graph
        self.plan = plan
        self.actual = actual
        self.passes = passes if plan is None else plan.passes
        self.why_no_plan = why_no_plan
        self.cached = cached
        self._keeps_kv = keeps_kv

    def to_dict(self) -> dict[str, Any]:
        """The plan, as `Plan.to_dict`; where a prompt cache was asked also `prompt_cache`: `calls` that have their
        answers, by node, and how many `rows` make no call and are not in the plan; of a run also `actual` and
        `actual_by_node` with the keys of `predicted` and `by_node`, `rows`, and `timeline`, a line for each call."""
        if self.plan is None:
            passes = [dict(each) for each in self.passes]
            made: dict[str, Any] = {"digest": digest(self.graph), "passes": passes, "predicted": None}
            made["why_no_plan"] = self.why_no_plan
        else:
            made = self.plan.to_dict()
        if self.cached is not None:
            made["prompt_cache"] = {"calls": dict(self.cached.calls), "rows": self.cached.rows}
        return made if self.actual is None else {**made, **actual_dict(self.actual)}

    def mermaid(self) -> str:
        """The nodes that call models and what they need, as a diagram in Mermaid's language; of a run with what its
        calls did."""
        counts = None if self.actual is None else self.actual.counts.by_node
        return graph_mermaid(self.graph, counts) if self.plan is None else mermaid(self.plan, counts)

    def svg(self) -> str:
        """The calls of a run over time, or the schedule in token steps, as a picture."""
        name = digest(self.graph)[:12]
        if self.actual is not None:
            return timeline_svg(self._run_bars(), f"workflow {name}: calls of the run", "s")
        return timeline_svg(self._plan_bars(), f"workflow {name}: schedule", "token steps")

    def rendered(self, form: ExplainFormat) -> str | dict[str, Any]:
        """In the form of this name; JSON as values."""
        match form:
            case "json":
                return self.to_dict()
            case "mermaid":
                return self.mermaid()
            case "svg":
                return self.svg()
            case "text":
                return str(self)

    def __str__(self) -> str:
        parts = Explained(
            self.graph, self.plan, self.actual, self.passes, self.why_no_plan, self._keeps_kv, self.cached
        )
        return explained(parts)

    def __repr__(self) -> str:
        return f"<explanation of workflow {digest(self.graph)[:12]}>"

    def _run_bars(self) -> Iterator[Bar]:
        assert self.actual is not None
        for row, call in timeline(self.actual):
            title = (
                f"row {row} {call.path}: {call.prompt_tokens:,} prompt tokens, {call.cached_tokens:,} of them cached "
                f"({call.continued_tokens:,} continued), {call.output_tokens:,} output tokens; waited "
                f"{call.queue_s:.3f} s, ran {call.run_s:.3f} s"
            )
            yield Bar(call.node, call.sent_s, call.started_s, call.ended_s, title)

    def _plan_bars(self) -> Iterator[Bar]:
        if self.plan is None:
            return
        operators = self.plan.analysed.unrolled.operators
        parts = self.plan.arrangement.parts
        ends = {part.group.engine: self.plan.arrangement.token_steps for part in parts}
        for part in reversed(parts):
            end, ends[part.group.engine] = max(ends[part.group.engine], part.start), part.start
            names = ", ".join(dict.fromkeys(operators[number].node for number in part.group.operators))
            first, last = part.group.rows
            title = f"rows {first}-{last - 1} on engine {part.group.engine}: {names}"
            yield Bar(names, part.start, part.start, end, title)
