"""Running graphs from code on an event loop.

What `weft.workflow.api` does by blocking is done on a thread: runs have an event loop of Weft's own, so that a caller's
loop that is busy delays none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from weft.loop_thread import on_thread, streamed_on_thread
from weft.workflow import api
from weft.workflow.explain.report import Explanation
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.remote_explanation import ServedExplanation
from weft.workflow.run.feed import RunNews
from weft.workflow.run.results import RunResults
from weft.workflow.targets import RunTarget


async def run_async(
    graph: WorkflowGraph, rows: Any, on: RunTarget, name: str, out: str | Path | TextIO | None, progress: bool | None,
    listen: Callable[[RunNews], None] | None, options: Mapping[str, Any],
) -> RunResults:  # fmt: skip
    """As `weft.workflow.api.run`; `listen` is called on the event loop that runs. Cancelling the caller cancels the
    run."""
    loop = asyncio.get_running_loop()
    tell = None if listen is None else partial(_tell_on, loop, listen)
    prepared = await asyncio.to_thread(api.prepared, graph, rows, on, name, out, progress, tell, options)
    return await on_thread(prepared.carry_out, prepared.cancel)


def _tell_on(loop: asyncio.AbstractEventLoop, listen: Callable[[RunNews], None], news: RunNews) -> None:
    loop.call_soon_threadsafe(listen, news)


async def stream_async(
    graph: WorkflowGraph, rows: Any, on: RunTarget, name: str, options: Mapping[str, Any]
) -> AsyncGenerator[api.RunEvent, None]:
    """As `weft.workflow.api.stream`. Closing the generator, or cancelling the caller, cancels the run."""
    run = await asyncio.to_thread(api.checked_run, graph, rows, on, options, name)
    events = streamed_on_thread(run.results, run.cancel)
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()


async def explain_async(
    graph: WorkflowGraph, rows: Any, on: RunTarget, options: Mapping[str, Any]
) -> Explanation | ServedExplanation:
    """As `weft.workflow.api.explain`."""
    return await asyncio.to_thread(partial(api.explain, graph, rows, on, **options))
