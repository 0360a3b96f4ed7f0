"""Health, version and traces."""

from __future__ import annotations

from typing import Literal

import msgspec


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Of the process (`/health`), or of its readiness for work (`/ready`)."""

    status: Literal["ok", "ready", "starting", "unavailable", "draining"]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The release that is running."""

    version: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A moment in a request's life."""

    what: str
    at_s: float
    """Seconds on the clock named by `source`; differences within a source are meaningful."""
    source: Literal["front", "engine"]
    detail: int = 0


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a request."""

    request_id: str
    spans: list[Span]
