"""The record of a request, attached to its ASGI scope."""

from __future__ import annotations

import re
import secrets
import time

from starlette.requests import Request
from starlette.types import Scope

from weft.endpoints.record import Record

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_KEY = "weft.record"


def new_record(scope: Scope, *, tracing: bool) -> Record:
    """Attach a record to a request. Its id is the caller's `X-Request-Id` if that is safe in a log."""
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
