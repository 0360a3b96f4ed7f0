"""The forms of a run in the API: its record as a card, its messages as events of a stream or a WebSocket."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import Send

from weft.abi.errors import WeftError
from weft.core.wire import ErrorRecord
from weft.programs.run.runs import Run, RunRecord
from weft.server.errors import ClientGone
from weft.server.guard import GONE
from weft.server.schemas.programs import RunCard, RunError, RunEvent
from weft.server.sse import DONE, EventStream
from weft.server.state import Service

MAX_SENT_BYTES = 256 << 10
"""After so many, messages of a run are sent, so that a long backlog does not hold up the event loop."""

_encoder = msgspec.json.Encoder()


def card_of(record: RunRecord, result: bytes | None = None, *, forgotten: bool = False) -> RunCard:
    """The record of a run in the API's form."""
    error = record.error
    return RunCard(
        id=record.id,
        program=record.program,
        hash=record.hash,
        kind=record.kind,
        trusted=record.trusted,
        model=record.model,
        status=record.status,
        result=msgspec.Raw(result) if result is not None else None,
        error=_told(error) if error is not None else None,
        created=record.created_s,
        started=record.started_s,
        finished=record.finished_s,
        usage=record.usage,
        limits=record.limits,
        parent=record.parent,
        forgotten=forgotten,
    )


def error_event(error: WeftError) -> RunEvent:
    """Event that a message or command of the client was refused."""
    return RunEvent(type="error", error=_told(ErrorRecord.of(error)))


def message_event(message: bytes) -> RunEvent:
    """Event of one message, JSON that the run sent."""
    return RunEvent(type="message", message=msgspec.Raw(message))


def end_event(run: Run) -> RunEvent:
    """Last event of a stream: the run's record with its result."""
    return RunEvent(type="end", run=card_of(run.record(), run.result))


def encode_event(event: RunEvent) -> bytes:
    """The event as JSON in UTF-8."""
    return _encoder.encode(event)


class RunStream(EventStream):
    """A run's messages as server-sent events, then its end. `owned`: the run ends if the client disconnects."""

    def __init__(self, request: Request, service: Service, run: Run, *, owned: bool):
        super().__init__(request, service)
        self._run = run
        self._owned = owned
        self._listener = run.messages()

    async def _produce(self, send: Send) -> None:
        first = RunEvent(type="run", run=card_of(self._run.record()), missed=self._listener.missed)
        await self._send(send, _line(first))
        async for message in self._listener:
            lines = [_line(message_event(message))]
            num_bytes = len(lines[0])
            while num_bytes < MAX_SENT_BYTES and (more := self._listener.take()) is not None:
                lines.append(_line(message_event(more)))
                num_bytes += len(lines[-1])
            await self._send(send, b"".join(lines))
        await self._run.wait()
        await self._send(send, _line(end_event(self._run)) + DONE)

    def _close(self, failure: BaseException | None) -> None:
        self._listener.close()
        if self._owned and failure is not None:
            self._run.cancel(GONE if isinstance(failure, ClientGone) else "the stream that launched it ended")


def _line(event: RunEvent) -> bytes:
    return b"data: " + encode_event(event) + b"\n\n"


def _told(error: ErrorRecord) -> RunError:
    return RunError(kind=error.kind, message=error.message, param=error.param, traceback=error.traceback)
