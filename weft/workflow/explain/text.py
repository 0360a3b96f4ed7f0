"""A plan as text: the graph, what the passes did, the prefix trees, the schedule, and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.outline import outline
from weft.workflow.planner.plan import Plan
from weft.workflow.planner.predict import Predicted

MAX_LINES = 40
"""Of the trees and of the schedule."""
MAX_NAMES = 6
_FIGURES = ("calls", "prompt", "cached", "continued", "prefill", "least", "output", "token steps")


def explained(graph: WorkflowGraph, plan: Plan) -> str:
    """The plan as text: graph, passes, prefixes, schedule, figures."""
    sections = [
        outline(graph),
        "\n".join(["optimiser", *_passes(plan)]),
        "\n".join(["prefixes of prompts (tokens, values, calls that end there)", *_cut(_trees(plan))]),
        "\n".join(["schedule", *_cut(_schedule(plan))]),
        "\n".join(["expected", *_figures(plan)]),
        _summary(plan),
    ]
    return "\n\n".join(sections) + "\n"


def _passes(plan: Plan) -> list[str]:
    lines = []
    for report in plan.passes:
        merged = [f"{', '.join(gone)} into {kept}" for kept, *gone in report["merged"]]
        said = [f"removed {_names(report['removed'])}"] if report["removed"] else []
        said += [f"merged {'; '.join(merged[:MAX_NAMES])}{_more(len(merged))}"] if merged else []
        if said:
            lines.append(f"  {report['name']}: {', '.join(said)}")
    return lines or ["  changed nothing"]


def _trees(plan: Plan) -> Iterator[str]:
    unrolled, tree = plan.analysed.unrolled, plan.analysed.tree
    depths: list[int] = []
    for number, node in enumerate(tree.to_dict(unrolled)):
        parent = node["parent"]
        if parent is None and (number == 0 or tree.nodes[number - 1].model != node["model"]):
            yield f"  {node['model']}"
        depths.append(0 if parent is None else depths[parent] + 1)
        piece = f"{{{{{node['value']}}}}}" if "value" in node else str(node["tokens"])
        ends = f"  -> {_names(node['nodes'])}" if "nodes" in node else ""
        yield f"  {'  ' * (depths[-1] + 1)}{piece}{ends}"


def _schedule(plan: Plan) -> Iterator[str]:
    operators = plan.analysed.unrolled.operators
    several = len(plan.engines) > 1
    for part in plan.arrangement.parts:
        group = part.group
        first, end = group.rows
        rows = f"row {first}" if end - first == 1 else f"rows {first}-{end - 1}"
        how = {"rows": ", row by row", "nodes": ", node by node"}[group.order]
        where = f" on engine {group.engine}" if several else ""
        names = _names([operators[number].node for number in group.operators])
        plain = len(group.operators) == 1 or end - first == 1
        yield f"  {part.start:12,.1f}  {rows}: {names}{'' if plain else how}{where}"


def _figures(plan: Plan) -> Iterator[str]:
    nodes = sorted(plan.prediction.by_node().items())
    width = max([len("all"), *(len(node) for node, _ in nodes)])
    rows = [("", *_FIGURES), *((node, *_row(each)) for node, each in nodes), ("all", *_row(plan.predicted))]
    widths = [max(len(row[column]) for row in rows) for column in range(1, len(rows[0]))]
    for name, *values in rows:
        yield f"  {name:{width}}  {'  '.join(f'{value:>{each}}' for value, each in zip(values, widths, strict=True))}"


def _row(figures: Predicted) -> Sequence[str]:
    tokens = (
        figures.prompt_tokens,
        figures.cached_tokens,
        figures.continued_tokens,
        figures.prefill_tokens,
        figures.min_prefill_tokens,
        figures.output_tokens,
    )
    return f"{figures.calls:,.6g}", *(f"{value:,}" for value in tokens), f"{figures.token_steps:,.1f}"


def _summary(plan: Plan) -> str:
    figures = plan.predicted
    by_row = plan.prediction.row_by_row_prefill_tokens()
    least = figures.min_prefill_tokens
    lines = [
        f"computes {figures.prefill_tokens:,} prompt tokens; row by row it would be {by_row:,}, and no order computes "
        f"fewer than {least:,}"
    ]
    if figures.seconds is not None and figures.lower_bound_s is not None:
        lines.append(f"takes about {figures.seconds:,.1f} s, and {figures.lower_bound_s:,.1f} s at least")
    return "\n".join(lines)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + _more(len(names))


def _more(count: int) -> str:
    return f" and {count - MAX_NAMES} more" if count > MAX_NAMES else ""


def _cut(lines: Iterable[str]) -> list[str]:
    whole = list(lines)
    left = len(whole) - MAX_LINES
    return whole if left <= 1 else [*whole[:MAX_LINES], f"  ... and {left:,} more lines"]
