"""An explanation: a plan with the graph that it is of, in each form in which it is shown."""

from __future__ import annotations

from typing import Any

from weft.workflow.explain.mermaid import mermaid
from weft.workflow.explain.text import explained
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.planner.plan import Plan


class Explanation:
    """What a run would do. As text it is for people; `to_dict` is for programs."""

    def __init__(self, graph: WorkflowGraph, plan: Plan):
        """`graph` is that of the user, before the optimiser."""
        self.graph = graph
        self.plan = plan

    def to_dict(self) -> dict[str, Any]:
        """The plan, as `Plan.to_dict`."""
        return self.plan.to_dict()

    def mermaid(self) -> str:
        """The nodes that call models and what they need, as a diagram in Mermaid's language."""
        return mermaid(self.plan)

    def __str__(self) -> str:
        return explained(self.graph, self.plan)

    def __repr__(self) -> str:
        return f"<explanation of workflow {self.plan.digest[:12]}>"
