"""The calls of a plan as a flow chart of Mermaid."""

from __future__ import annotations

from weft.workflow.planner.plan import Plan


def mermaid(plan: Plan) -> str:
    """A box for each node that calls a model, with expected calls a row and output tokens; an arrow for each answer
    that another needs, thick where a conversation goes on."""
    operators = plan.analysed.unrolled.operators
    labels = list(dict.fromkeys(operator.node for operator in operators))
    number = {label: f"n{at}" for at, label in enumerate(labels)}
    lines = ["flowchart TD"]
    for label in labels:
        mine = [operator for operator in operators if operator.node == label]
        calls = sum(operator.calls for operator in mine)
        often = "" if calls == 1 else f" × {calls:.3g}"
        lines.append(f'  {number[label]}["{_quoted(label)}{often}<br/>{mine[0].output_tokens} tokens"]')
    arrows: dict[tuple[str, str], bool] = {}
    for operator in operators:
        for need in operator.needs:
            ends = number[operators[need].node], number[operator.node]
            arrows[ends] = arrows.get(ends, False) or operator.continues == need
    lines += [f"  {start} {'==>' if goes_on else '-->'} {end}" for (start, end), goes_on in arrows.items()]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Text within a label of Mermaid, whose entities begin with #."""
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
