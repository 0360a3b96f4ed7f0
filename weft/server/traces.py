"""Traces of recent requests, while tracing is on. Their number is bounded; a tenant sees its own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from weft.core.wire import Event, TraceSpan
from weft.endpoints.record import Record, trace_id
from weft.server.schemas.service import Span, Trace

MAX_TRACES = 1024
MAX_SPANS = 512


@dataclass(slots=True)
class _Kept:
    record: Record
    engine: list[TraceSpan] = field(default_factory=list)
    front: list[tuple[str, float]] = field(default_factory=list)


class Traces:
    """Request -> spans reported by engines and by the front."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def begin(self, record: Record) -> None:
        """Begin the trace of a request, and drop the oldest trace if there are too many."""
        if self.enabled:
            self._kept[trace_id(record.tenant, record.request_id)] = _Kept(record)
            if len(self._kept) > MAX_TRACES:
                self._kept.popitem(last=False)

    def on_event(self, event: Event) -> None:
        """Record an engine's event that does not belong to an operation."""
        if isinstance(event, TraceSpan) and (kept := self._kept.get(event.request_id)) and len(kept.engine) < MAX_SPANS:
            kept.engine.append(event)

    def finish(self, record: Record) -> None:
        """Add the front's spans of a request that has ended."""
        kept = self._kept.get(trace_id(record.tenant, record.request_id)) if self.enabled else None
        if kept is not None and kept.record is record:
            kept.front = record.spans[:MAX_SPANS]

    def get(self, tenant: str, request_id: str) -> Trace | None:
        """The trace of a request of this tenant; None for an unknown request."""
        kept = self._kept.get(trace_id(tenant, request_id))
        if kept is None:
            return None
        front = [Span(what=what, at_s=at_s, source="front") for what, at_s in kept.front]
        engine = [Span(what=span.what, at_s=span.at_s, source="engine", detail=span.detail) for span in kept.engine]
        return Trace(request_id=request_id, spans=front + engine)
