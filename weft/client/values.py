"""Programs and runs as the HTTP API describes them, as Python values; twins of the server's schemas."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a program."""

    hash: str
    kind: Literal["python", "wasm"]
    size_bytes: int
    created: float


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program, and the version that was asked for."""

    name: str
    hash: str
    kind: Literal["python", "wasm"]
    size_bytes: int
    created: float
    versions: list[Version] = []
    trusted: bool = False


class RunError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a run that did not finish, or the refusal of a message."""

    kind: str
    message: str
    param: str | None = None
    traceback: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a program or of a workflow. Times are seconds since 1970."""

    id: str
    program: str
    hash: str
    kind: Literal["python", "wasm", "workflow"]
    trusted: bool
    model: str
    status: Literal["queued", "running", "finished", "failed", "cancelled"]
    result: Any = None
    error: RunError | None = None
    created: float
    started: float | None = None
    finished: float | None = None
    usage: dict[str, Any] = {}
    limits: dict[str, Any] | None = {}
    """Of a program."""
    workflow: dict[str, Any] | None = None
    """How far a run of a workflow is: `rows`, `done`, `failed`, `calls`, `by_node`, …"""
    parent: str | None = None
    forgotten: bool = False
    """Its result, messages and log are no longer kept."""

    @property
    def ended(self) -> bool:
        """Whether the run has finished, failed or was cancelled."""
        return self.status not in ("queued", "running")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that waits, and where its KV is. Times are seconds since 1970."""

    id: int
    request_id: str
    model: str
    state: str
    """`intercepted`, `finished` or `queued`."""
    waits_for: str
    tokens: int
    device_tokens: int
    host_tokens: int
    gone_tokens: int
    since: float
    until: float | None = None
    """The expected return."""
    expected_by: str | None = None
    """What `until` rests on: `announced`, `learned` or `elapsed`."""


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of the tenant, those that wait longest first."""

    data: list[Session]
    left_out: int
    """Further ones, for which the limit left no room."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a run's log."""

    at: float
    level: Literal["debug", "info", "warning", "error"]
    text: str


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a run: first `run`, then `message` for each message, last `end` with the result. An `error` says that
    a message to the run was refused."""

    type: Literal["run", "message", "end", "error"]
    run: Run | None = None
    message: Any = None
    missed: int = 0
    error: RunError | None = None
