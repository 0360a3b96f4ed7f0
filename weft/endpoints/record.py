"""The record of one request while it runs: its caller, and the values for its log line, the metrics and its trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from weft.core.objectives import Objective, check_objective
from weft.core.wire import OperationUsage, Started
from weft.programs.types import Caller
from weft.tokenizers.chats import EncodedChat


@dataclass(slots=True)
class Record:
    """One request. It never holds outputs or keys, and prompts only on behalf of a caller in this process."""

    request_id: str
    started_s: float
    """Start of the request, in seconds of the monotonic clock."""
    tenant: str = ""
    model: str = ""
    route: str = ""
    """The pattern of the matched route, never the path as sent."""
    stream: bool = False
    body_bytes: int = 0
    """Size of the request's body, once it has been read."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_details: int = 0
    """Number of tokens with details in the response; with many, its encoding takes long."""
    first_token_s: float | None = None
    """Seconds from the start to the first token."""
    outcome: str = "ok"
    """`ok`, `error`, or `disconnect` if the client closed the connection first."""
    spans: list[tuple[str, float]] = field(default_factory=list)
    """(name, time on the monotonic clock); kept only while tracing is on."""
    tracing: bool = False
    on_start: Callable[[Started], None] | None = None
    """Told when the engine begins with the first choice of the first prompt; after a crash of the engine again."""
    usage: OperationUsage | None = None
    """Of that choice, once it has ended."""
    on_first_token: Callable[[], None] | None = None
    """Told when the first token has come."""
    wait_kind: str | None = None
    """What its client does after the answer, where more is known than the endpoint tells (a `WaitKind`; empty: no
    request goes on with it)."""
    expected_in_s: float | None = None
    """When a request goes on with the answer, if that is known."""
    replica: int | None = None
    """The engine that it should go to, among those of its model; None: any."""
    prompt: EncodedChat | None = None
    """Its chat, where the caller has rendered and tokenized it."""

    def mark(self, what: str) -> None:
        """Record the present time under a name, while tracing is on."""
        if self.tracing:
            self.spans.append((what, time.monotonic()))

    def caller(
        self,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        objective: Objective = "latency",
        deadline_s: float | None = None,
    ) -> Caller:
        """The caller on whose behalf the programs of this request run. A deadline counts from the request's start.
        Raises `InvalidRequest` for an objective whose deadline is missing, or a deadline without one."""
        check_objective(objective, deadline_s)
        return Caller(
            request_id=trace_id(self.tenant, self.request_id),
            tenant=self.tenant,
            namespace=namespace_of(self.tenant, cache_salt),
            priority=priority,
            objective=objective,
            deadline_at_s=None if deadline_s is None else self.started_s + deadline_s,
        )


def trace_id(tenant: str, request_id: str) -> str:
    """The name of a request in engines. It is unique per tenant, because names of tenants have no slash."""
    return f"{tenant}/{request_id}" if tenant else request_id


def namespace_of(tenant: str, cache_salt: str | None) -> str:
    """The cache namespace of a request: its tenant joined with its salt, so that no two pairs collide."""
    return tenant if cache_salt is None else msgspec.json.encode([tenant, cache_salt]).decode()
