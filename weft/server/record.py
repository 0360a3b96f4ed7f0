"""What is remembered of one request while it runs: for its log line, the metrics and its trace."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_KEY = "weft.record"


@dataclass(slots=True)
class Record:
    """One request. Never holds prompts, outputs or keys."""

    request_id: str
    started_s: float
    """On the monotonic clock."""
    tenant: str = ""
    model: str = ""
    route: str = ""
    """The pattern that matched, never the path as sent."""
    stream: bool = False
    body_bytes: int = 0
    """Size of the request's body, once it is read."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Seconds after the start."""
    outcome: str = "ok"
    """`ok`, `error`, or `disconnect` where the client went away first."""
    spans: list[tuple[str, float]] = field(default_factory=list)
    """Moments on the monotonic clock; kept only while tracing is on."""
    tracing: bool = False

    def mark(self, what: str) -> None:
        """Note a moment, where tracing is on."""
        if self.tracing:
            self.spans.append((what, time.monotonic()))


def new_record(scope: Scope, *, tracing: bool) -> Record:
    """Attach a record to a request. Its id is the caller's `X-Request-Id` where that is harmless in a log."""
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    request_id = sent if _SANE_ID.match(sent) else secrets.token_hex(16)
    record = Record(request_id, time.monotonic(), tracing=tracing)
    record.mark("received")
    scope[_KEY] = record
    return record


def record_in(scope: Scope) -> Record:
    """The record that was attached to this scope."""
    record: Record = scope[_KEY]
    return record


def record_of(request: Request) -> Record:
    """The record that was attached to this request."""
    return record_in(request.scope)
