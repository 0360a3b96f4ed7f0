"""Progress bars of a run on standard error: rows, and each node that calls a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.workflow.actuals import RunCounts

Show = Callable[[RunCounts], None]
MAX_BARS = 12
"""Nodes that have a bar of their own; the first ones to make a call."""


@contextmanager
def bars(num_rows: int | None, before: RunCounts) -> Iterator[Show]:
    """Bars that show the counts that they are given. `num_rows`: None where it is not known. `before`: what the run had
    done when it was interrupted."""
    # Imported here, so that runs without bars do not load it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[more]}"),
    )
    # Lines that are written to standard error meanwhile stand above the bars, whole: commands in them can be copied.
    with Progress(*columns, console=Console(stderr=True, soft_wrap=True)) as progress:
        rows = progress.add_task("rows", total=num_rows, more="")
        nodes: dict[str, TaskID] = {}

        def show(counts: RunCounts) -> None:
            elapsed_s = progress.tasks[rows].elapsed or 0.0
            output_tokens = counts.calls.output_tokens - before.calls.output_tokens
            rate = f"{output_tokens / elapsed_s:.0f} tokens/s" if elapsed_s else ""
            failed = f" {counts.failed_rows} failed" if counts.failed_rows else ""
            progress.update(rows, completed=counts.rows, more=rate + failed)
            for name, calls in counts.by_node.items():
                if name not in nodes and len(nodes) < MAX_BARS:
                    # How often a body is evaluated is not known in advance.
                    nodes[name] = progress.add_task(f"  {name}", total=None if "." in name else num_rows, more="")
                if name in nodes:
                    cached = f"{calls.cached_tokens / calls.prompt_tokens:.0%} cached" if calls.prompt_tokens else ""
                    answered = calls.calls + calls.merged_calls + calls.cached_calls
                    progress.update(nodes[name], completed=answered, more=cached)

        yield show
