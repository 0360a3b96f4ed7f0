"""Responses about health, version and traces."""

from __future__ import annotations

from typing import Literal

import msgspec


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the process (`/health`), or of its readiness for requests (`/ready`)."""

    status: Literal["ok", "ready", "starting", "unavailable", "draining"]


class ServerVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The release that is running."""

    version: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A named moment of a request."""

    what: str
    at_s: float
    """Seconds on the clock named by `source`; differences within a source are meaningful."""
    source: Literal["front", "engine"]
    detail: int = 0


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of a request."""

    request_id: str
    spans: list[Span]
