"""The events of a workflow's run, as server-sent events.

The number of an event is that of the last result before it; in a run that tells texts or starts of calls, the position
in its feed stands behind that. Results come from the store, so a stream that begins again
behind a number misses none, and a client that reads slowly holds nothing in memory. What is between results (progress)
is told as it is when it is sent.
"""

from __future__ import annotations

import itertools

import msgspec
from starlette.requests import Request
from starlette.types import Send

from weft.abi.errors import UnknownRun
from weft.server.errors import ClientGone
from weft.server.guard import GONE
from weft.server.schemas.workflows import DEFAULT_PAGE, TextPiece, WorkflowEvent
from weft.server.sse import DONE, EventStream
from weft.server.state import Service
from weft.server.workflow_cards import numbered, started_card, wait_card, workflow_run_card
from weft.store.served_runs import NumberedResult
from weft.workflow.actuals import RunCounts
from weft.workflow.run.feed import FeedReader, RunFeed, TextDelta
from weft.workflow.service.live_run import WorkflowRun

PROGRESS_S = 0.25
"""Least time between two events of progress without a result between them."""
_encoder = msgspec.json.Encoder()


class WorkflowStream(EventStream):
    """A run's results behind number `after`, what it tells behind `position`, its progress, then its end. `owned`: the
    run is cancelled if the client disconnects."""

    def __init__(
        self,
        request: Request,
        service: Service,
        run: WorkflowRun,
        *,
        after: int = 0,
        position: int = 0,
        owned: bool = False,
    ):
        super().__init__(request, service)
        self._position = position
        self._is_whole = not after and not position
        """Whether the client has nothing of the run yet."""
        self._feed: RunFeed | None = None
        self._reader: FeedReader | None = None
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
            lines = [self._news()]
            results: list[NumberedResult] = []
            if record.counts.rows > self._last:
                results = await self._runs.results(self._run, self._last, DEFAULT_PAGE)
                if not results and record.ended:
                    raise UnknownRun(
                        f"The run {self._run.id} was deleted while its events were read; its results behind number "
                        f"{self._last} are gone.",
                        "run",
                    )
                for number, result in results:
                    lines.append(self._rest(number, result))
                    self._last = number
                    lines.append(self._line(WorkflowEvent(type="row", row=msgspec.Raw(numbered(number, result)))))
            lines += [self._waits(), self._progress(has_results=any(lines))]
            await self._send(send, b"".join(lines))
            if results and record.counts.rows > self._last:
                continue
            if record.ended:
                break
            await changes.wait()
        await self._send(send, self._line(WorkflowEvent(type="end", run=workflow_run_card(self._run))) + DONE)

    def _news(self) -> bytes:
        """Texts and starts of calls that were not told yet."""
        if self._feed is not self._run.feed:
            self._begin_reading()
        if self._reader is None or not self._reader.has_news:
            return b""
        news = self._reader.read()
        self._position = news.position
        if not (news.texts or news.starts or news.num_lost):
            return b""
        # One event, which a client has or has not: its position says what was told.
        starts = [started_card(start) for start in news.starts]
        return self._line(
            WorkflowEvent(type="live", texts=_pieces(news.texts), starts=starts, lost_starts=news.num_lost)
        )

    def _begin_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._feed = self._run.feed
        self._reader = None if self._feed is None else self._feed.reader(self._position, self._run.notify)

    def _rest(self, number: int, result: bytes) -> bytes:
        """What is left to tell of the texts of a row that has ended. A stream that begins behind a result does not know
        what was told of rows that had ended by then."""
        names = self._run.record.spec.stream
        if not names or (not self._is_whole and (self._reader is None or number <= self._reader.num_ended_before)):
            return b""
        row = msgspec.json.decode(result)
        if self._reader is not None:
            rest = self._reader.rest(row["row"], row["outputs"])
        else:
            texts = ((name, row["outputs"].get(name)) for name in names)
            rest = [TextDelta(row["row"], name, 0, text) for name, text in texts if isinstance(text, str) and text]
        return self._line(WorkflowEvent(type="live", texts=_pieces(rest))) if rest else b""

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
        position = b".%d" % self._position if self._reader is not None or self._position else b""
        return b"id: %d%b\ndata: %b\n\n" % (self._last, position, _encoder.encode(event))

    def _close(self, failure: BaseException | None) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._owned and failure is not None:
            self._run.cancel(GONE if isinstance(failure, ClientGone) else "the stream that started it ended")


def _pieces(texts: list[TextDelta]) -> list[TextPiece]:
    return [TextPiece(**one._asdict()) for one in texts]
