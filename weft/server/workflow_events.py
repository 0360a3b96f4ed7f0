"""The events of a workflow's run, as server-sent events.

The number of an event is that of the last result before it. Results come from the store, so a stream that begins again
behind a number misses none, and a client that reads slowly holds nothing in memory. What is between results (progress)
is told as it is when it is sent.
"""

from __future__ import annotations

import itertools

import msgspec
from starlette.requests import Request
from starlette.types import Send

from weft.server.errors import ClientGone
from weft.server.run_events import GONE
from weft.server.schemas.workflows import DEFAULT_PAGE, WorkflowEvent
from weft.server.sse import DONE, EventStream
from weft.server.state import Service
from weft.server.workflow_cards import numbered, wait_card, workflow_run_card
from weft.workflow.run.instructions import RunCounts
from weft.workflow.service.live_run import WorkflowRun

PROGRESS_S = 0.25
"""Least time between two events of progress without a result between them."""
_encoder = msgspec.json.Encoder()


class WorkflowStream(EventStream):
    """A run's results behind number `after`, its progress, then its end. `owned`: the run is cancelled if the client
    disconnects."""

    def __init__(self, request: Request, service: Service, run: WorkflowRun, *, after: int = 0, owned: bool = False):
        super().__init__(request, service)
        self._run = run
        self._runs = service.workflows.runs
        self._timer = service.timer
        self._last = after
        self._owned = owned
        self._told = RunCounts()
        self._told_s = 0.0
        self._told_wait = 0
        """The number of the last wait that was told."""

    async def _produce(self, send: Send) -> None:
        await self._send(send, self._line(WorkflowEvent(type="run", run=workflow_run_card(self._run))))
        while True:
            changes, record = self._run.changes(), self._run.record
            lines = b""
            if record.counts.rows > self._last:
                for number, result in await self._runs.results(self._run, self._last, DEFAULT_PAGE):
                    self._last = number
                    lines += self._line(WorkflowEvent(type="row", row=msgspec.Raw(numbered(number, result))))
            lines += self._waits() + self._progress(has_results=bool(lines))
            await self._send(send, lines)
            if record.counts.rows > self._last:
                continue
            if record.ended:
                break
            await changes.wait()
        await self._send(send, self._line(WorkflowEvent(type="end", run=workflow_run_card(self._run))) + DONE)

    def _waits(self) -> bytes:
        """Values that the run has begun to wait for."""
        new = [*itertools.takewhile(lambda wait: wait.number > self._told_wait, reversed(self._run.waits.values()))]
        if not new:
            return b""
        self._told_wait = new[0].number
        return b"".join(
            self._line(WorkflowEvent(type="wait", wait=wait_card(wait, args=True))) for wait in reversed(new)
        )

    def _progress(self, *, has_results: bool) -> bytes:
        counts, now_s = self._run.record.counts, self._timer.now()
        if counts == self._told or not (has_results or now_s - self._told_s >= PROGRESS_S):
            return b""
        self._told, self._told_s = counts, now_s
        return self._line(WorkflowEvent(type="progress", progress=workflow_run_card(self._run).workflow))

    def _line(self, event: WorkflowEvent) -> bytes:
        return b"id: %d\ndata: %b\n\n" % (self._last, _encoder.encode(event))

    def _close(self, failure: BaseException | None) -> None:
        if self._owned and failure is not None:
            self._run.cancel(GONE if isinstance(failure, ClientGone) else "the stream that started it ended")
