"""The record of one request while it runs: who asks, and what its log line, the metrics and its trace say of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from weft.programs.types import Caller


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
    num_details: int = 0
    """Tokens of which the response says something each: with many, its encoding takes long."""
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

    def caller(self, *, cache_salt: str | None = None, priority: int = 0) -> Caller:
        """The caller on whose behalf the programs of this request run."""
        return Caller(
            request_id=trace_id(self.tenant, self.request_id),
            tenant=self.tenant,
            namespace=namespace_of(self.tenant, cache_salt),
            priority=priority,
        )


def trace_id(tenant: str, request_id: str) -> str:
    """What engines call a request. Tenants may send the same request id; names of tenants have no slash."""
    return f"{tenant}/{request_id}" if tenant else request_id


def namespace_of(tenant: str, cache_salt: str | None) -> str:
    """The cache namespace of a request: its tenant joined with its salt, so that no two pairs collide."""
    return tenant if cache_salt is None else msgspec.json.encode([tenant, cache_salt]).decode()
