"""An explanation as text: the graph, what the passes did, the prefix trees, the schedule, the figures, the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.core.wording import plural
from weft.workflow.actuals import CachedFigures, RunActuals
from weft.workflow.explain.actual import compared, waited
from weft.workflow.explain.table import aligned
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.graph.outline import outline
from weft.workflow.planner.plan import Plan
from weft.workflow.planner.predict import Predicted

MAX_LINES = 40
"""Of the trees and of the schedule."""
MAX_NAMES = 6
_FIGURES = ("calls", "prompt", "cached", "continued", "prefill", "least", "output", "token steps")


class Explained(NamedTuple):
    """What an explanation is made of."""

    graph: WorkflowGraph
    """That of the user, before the optimiser."""
    plan: Plan | None
    actual: RunActuals | None
    """Of a run."""
    passes: Sequence[Mapping[str, Any]]
    """What the optimiser did."""
    why_no_plan: str
    keeps_kv: bool = True
    """Whether engines keep KV on request."""
    cached: CachedFigures | None = None
    """What the prompt cache has, where it was asked."""


def explained(parts: Explained) -> str:
    """An explanation as text: graph, passes, prefixes, schedule, pins, figures; of a run those beside what it did."""
    plan, actual = parts.plan, parts.actual
    sections = [outline(parts.graph), "\n".join(["optimiser", *_passes(parts.passes)])]
    if parts.cached is not None:
        sections.append("\n".join(["prompt cache", *_cut(_cached(parts.cached))]))
    if plan is None:
        sections.append(f"there is no plan: {parts.why_no_plan}")
    else:
        sections += [
            "\n".join(["prefixes of prompts (tokens, values, calls that end there)", *_cut(_trees(plan))]),
            "\n".join(["schedule", *_cut(_schedule(plan))]),
            "\n".join(["pins (tokens, parts of the schedule, calls)", *_cut(_pins(plan, keeps_kv=parts.keeps_kv))]),
            "\n".join(["expected", *_figures(plan)]),
            _summary(plan),
        ]
    if actual is not None:
        sections += [
            "\n".join(["expected and actual", *compared(plan, actual)]),
            "\n".join(["time of calls", *waited(actual)]),
            _outcome(plan, actual),
        ]
    return "\n\n".join(sections) + "\n"


def _passes(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for report in passes:
        merged = [f"{', '.join(gone)} into {kept}" for kept, *gone in report["merged"]]
        said = [f"removed {_names(report['removed'])}"] if report["removed"] else []
        said += [f"merged {'; '.join(merged[:MAX_NAMES])}{_more(len(merged))}"] if merged else []
        if said:
            lines.append(f"  {report['name']}: {', '.join(said)}")
    return lines or ["  changed nothing"]


def _cached(cached: CachedFigures) -> Iterator[str]:
    if not cached.calls:
        yield "  has no answer of these calls"
    for node, count in sorted(cached.calls.items()):
        yield f"  {node}: {count:,} {'call has its answer' if count == 1 else 'calls have their answers'}"
    if cached.rows:
        rows = f"{cached.rows:,} row" + ("s make" if cached.rows > 1 else " makes")
        yield f"  {rows} no call: schedule and figures are those of the others"
    if cached.calls:
        yield "  figures count calls of rows that make another one, though they have their answers"


def _outcome(plan: Plan | None, actual: RunActuals) -> str:
    calls, rows = actual.counts.calls, actual.counts
    lines = [f"{plural(rows.rows, 'row')} ended, {rows.failed_rows:,} failed"]
    saved = [f"{calls.merged_calls:,} more had the answer of an equal call"] if calls.merged_calls else []
    saved += [f"{calls.cached_calls:,} that of the prompt cache"] if calls.cached_calls else []
    lines[0] += f"; {plural(calls.calls, 'call')}" + (f", {', '.join(saved)}" if saved else "")
    found = calls.cached_tokens / calls.prompt_tokens if calls.prompt_tokens else 0.0
    least = ""
    if plan is not None:
        # Of the plan: which calls would have the answer of an equal one was not known before the run.
        planned = plan.predicted
        least = f"; the {planned.calls:,.6g} calls of the plan need {planned.min_prefill_tokens:,} in any order"
    lines.append(f"computed {calls.prefill_tokens:,} prompt tokens, found {found:.0%}{least}")
    if actual.seconds is not None:
        expected = None if plan is None else plan.predicted.seconds
        lines.append(f"took {actual.seconds:,.1f} s" + ("" if expected is None else f"; expected {expected:,.1f} s"))
    return "\n".join(lines)


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


def _pins(plan: Plan, *, keeps_kv: bool) -> Iterator[str]:
    if not keeps_kv:
        yield "  none: this server is not told which KV to keep, as one of Weft and a model of the process are"
    elif not plan.pins:
        yield "  none: no part of the schedule comes back to a prefix after it was left"
    operators = plan.analysed.unrolled.operators
    for pin in plan.pins:
        where = f" on engine {pin.engine}" if len(plan.engines) > 1 else ""
        names = _names(list(dict.fromkeys(operators[number].node for number in pin.users)))
        yield f"  {len(pin.tokens):12,}  {pin.start}-{pin.end}: {names}{where}"


def _figures(plan: Plan) -> Iterator[str]:
    nodes = sorted(plan.prediction.by_node().items())
    yield from aligned(
        [("", *_FIGURES), *((node, *_row(each)) for node, each in nodes), ("all", *_row(plan.predicted))]
    )


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
