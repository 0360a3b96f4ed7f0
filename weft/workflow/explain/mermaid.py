"""The calls of a plan as a flow chart of Mermaid."""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.wording import plural
from weft.workflow.actuals import CallCounts
from weft.workflow.graph.digest import free_references
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.nodes import LlmNode, WorkflowGraph
from weft.workflow.planner.plan import Plan

Counted = Mapping[str, CallCounts]
"""By label."""


def mermaid(plan: Plan, counts: Counted | None = None) -> str:
    """A box for each node that calls a model, with expected calls a row and output tokens, and what the calls of a run
    did; an arrow for each answer that another needs, thick where a conversation goes on."""
    operators = plan.analysed.unrolled.operators
    labels = list(dict.fromkeys(operator.node for operator in operators))
    number = {label: f"n{at}" for at, label in enumerate(labels)}
    lines = ["flowchart TD"]
    for label in labels:
        mine = [operator for operator in operators if operator.node == label]
        calls = sum(operator.calls for operator in mine)
        often = "" if calls == 1 else f" × {calls:.3g}"
        lines.append(
            f'  {number[label]}["{_quoted(label)}{often}<br/>{mine[0].output_tokens} tokens{_did(label, counts)}"]'
        )
    arrows: dict[tuple[str, str], bool] = {}
    for operator in operators:
        for need in operator.needs:
            ends = number[operators[need].node], number[operator.node]
            arrows[ends] = arrows.get(ends, False) or operator.continues == need
    lines += [f"  {start} {'==>' if goes_on else '-->'} {end}" for (start, end), goes_on in arrows.items()]
    return "\n".join(lines)


def graph_mermaid(graph: WorkflowGraph, counts: Counted | None = None) -> str:
    """The same of a graph without a plan: a box for each outer node, with arrows, and for each call inside one."""
    nodes = dict(labelled_nodes(graph.nodes))
    number = {label: f"n{at}" for at, label in enumerate(nodes)}
    lines = ["flowchart TD"]
    for label, node in nodes.items():
        if isinstance(node, LlmNode) or node in graph.nodes:
            lines.append(f'  {number[label]}["{_quoted(label)}{_did(label, counts)}"]')
    for node in graph.nodes:
        for name in dict.fromkeys(reference.name for reference in free_references(node)):
            if name in number:
                lines.append(f"  {number[name]} --> {number[node.id]}")
    return "\n".join(lines)


def _did(label: str, counts: Counted | None) -> str:
    if counts is None or label not in counts:
        return ""
    mine = counts[label]
    return f"<br/>actual {plural(mine.calls, 'call')}, {plural(mine.output_tokens, 'token')}"


def _quoted(text: str) -> str:
    """Text within a label of Mermaid, whose entities begin with #."""
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
