"""A progress bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.llm.results import Result


@contextmanager
def bar(total: int | None) -> Iterator[Callable[[Result], None]]:
    """A bar on standard error that advances with each result."""
    # Imported here, so that programs without a bar do not load it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[rate]}"))
    with Bar("prompts", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total, rate="")
        num_tokens = 0

        def advance(result: Result) -> None:
            nonlocal num_tokens
            num_tokens += result.num_output_tokens
            elapsed = bar.tasks[task].elapsed or 0.0
            bar.update(task, advance=1, rate=f"{num_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else "")

        yield advance
