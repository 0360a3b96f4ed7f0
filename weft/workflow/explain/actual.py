"""What a run took beside what its plan predicted. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.workflow.actuals import CallCounts, CallTrace, RunActuals, figures_of
from weft.workflow.explain.table import aligned
from weft.workflow.planner.plan import Plan
from weft.workflow.planner.predict import Predicted

_COMPARED = (
    ("calls", "calls"),
    ("prompt", "prompt_tokens"),
    ("cached", "cached_tokens"),
    ("continued", "continued_tokens"),
    ("prefill", "prefill_tokens"),
    ("output", "output_tokens"),
)
"""Head, figure."""


def actual_dict(actual: RunActuals) -> dict[str, Any]:
    """Figures under the names of the plan's, and a line for each call that is kept, in the order in which they were
    sent."""
    by_node = sorted(actual.counts.by_node.items())
    return {
        "actual": figures_of(actual.counts.calls, actual.seconds),
        "actual_by_node": {node: figures_of(counts) for node, counts in by_node},
        "rows": {"done": actual.counts.rows, "failed": actual.counts.failed_rows},
        "timeline": [
            {"row": row, **call._asdict(), "queue_s": call.queue_s, "run_s": call.run_s}
            for row, call in timeline(actual)
        ],
    }


def timeline(actual: RunActuals) -> list[tuple[int, CallTrace]]:
    """(row, call) of those that were made, in the order in which they were sent."""
    calls = [(trace.row, call) for trace in actual.rows for call in trace.calls if call.ended_s]
    return sorted(calls, key=lambda each: (each[1].sent_s, each[0], each[1].path))


def compared(plan: Plan | None, actual: RunActuals) -> Iterator[str]:
    """Lines of a table: by node, expected and actual figures."""
    expected = {} if plan is None else plan.prediction.by_node()
    counts = actual.counts
    nodes = sorted({*expected, *counts.by_node})
    rows = [("", *(head for head, _ in _COMPARED), "", *(f"actual {head}" for head, _ in _COMPARED))]
    rows += [(node, *_pair(expected.get(node), counts.by_node.get(node, CallCounts()))) for node in nodes]
    rows.append(("all", *_pair(None if plan is None else plan.predicted, counts.calls)))
    yield from aligned(rows)


def waited(actual: RunActuals) -> Iterator[str]:
    """Lines of a table: by node, how long calls waited and ran."""
    found: dict[str, list[CallTrace]] = {}
    for _, call in timeline(actual):
        found.setdefault(call.node, []).append(call)
    rows: list[tuple[str, ...]] = [("", "calls", "mean queue s", "max queue s", "mean run s", "max run s")]
    for node, calls in sorted(found.items()):
        queue, run = [call.queue_s for call in calls], [call.run_s for call in calls]
        seconds = sum(queue) / len(calls), max(queue), sum(run) / len(calls), max(run)
        rows.append((node, f"{len(calls):,}", *(f"{value:,.3f}" for value in seconds)))
    yield from aligned(rows)


def _pair(expected: Predicted | None, counts: CallCounts) -> Iterator[str]:
    figures = figures_of(counts)
    yield from (_shown(None if expected is None else expected._asdict(), name) for _, name in _COMPARED)
    yield ""
    yield from (_shown(figures, name) for _, name in _COMPARED)


def _shown(figures: dict[str, Any] | None, name: str) -> str:
    return "-" if figures is None else f"{figures[name]:,.6g}"
