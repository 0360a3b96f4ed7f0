"""One run of a program as its launcher and its clients see it: its state, messages, log and end.

Owns the state machine below and the bounded content kept for later readers. A `Control` executes the run, in this
process (`weft.programs.host`) or in another one (`weft.programs.host.client`). Used from one event loop.

    queued ──▶ running ──▶ finished | failed | cancelled
       └─────────────────▶ failed | cancelled
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import msgspec

from weft.abi.errors import RunCancelled, RunEnded, WeftError
from weft.core.wire import ErrorRecord
from weft.programs.quota.limits import Limits
from weft.programs.registry import Code
from weft.programs.run.listeners import Listener
from weft.store.programs import ProgramKind

Status = Literal["queued", "running", "finished", "failed", "cancelled"]

TRANSITIONS: dict[Status, frozenset[Status]] = {
    "queued": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"finished", "failed", "cancelled"}),
    "finished": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

KEPT_MESSAGES = 1000
"""Most messages kept of each run for later listeners; the oldest are dropped first."""
KEPT_MESSAGE_BYTES = 1 << 20
KEPT_LOG_BYTES = 256 << 10
"""Most bytes kept of each run's log; the oldest lines are dropped first."""
LINE_COST_BYTES = 64
"""Cost of a line of a log beside its text, so that empty lines are bounded too."""
LEVELS = ("debug", "info", "warning", "error")


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The code of a run, its arguments and its options."""

    code: Code
    args: bytes = b"null"
    """JSON."""
    limits: Limits = Limits()
    trusted: bool = False
    """Whether the program runs without a sandbox; the host must allow it."""
    model: str = ""
    """The name of a model of the host; empty: the first model."""
    reserve_pages: int = 0
    """KV pages reserved for the run at its start."""


class RunUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a run has used so far."""

    cpu_s: float = 0.0
    """Processor time of the program, of the host on its behalf, and of its children."""
    memory_bytes: int = 0
    """Peak memory of the sandbox, for Wasm modules. 0 for programs in Python: the Wasm engine does not report the
    memory of components."""
    host_calls: int = 0
    prompt_tokens: int = 0
    """Tokens appended to sequences or computed in forward passes."""
    cached_tokens: int = 0
    """Of those, tokens whose KV was found instead of computed."""
    host_tokens: int = 0
    """Tokens whose KV was brought back from the host, for a prompt or after a wait; some perhaps several times."""
    recomputed_tokens: int = 0
    """Tokens computed again, for a prompt or after a wait: their KV had existed and was given up. Some perhaps several
    times."""
    generated_tokens: int = 0
    """Tokens of generations, and tokens that forward passes sampled."""
    waited_s: float = 0.0
    """Sum of all waits for anything but the model: HTTP, messages, children, sleeps."""
    throttled_s: float = 0.0
    """Time for which commands waited because the tenant's programs had used up a rate."""
    http_requests: int = 0
    children: int = 0
    pages_peak: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a run, without its arguments and messages."""

    id: str
    program: str
    """The name under which the program was launched; empty for a source that was not uploaded."""
    hash: str
    kind: ProgramKind
    trusted: bool
    tenant: str
    model: str
    status: Status
    error: ErrorRecord | None = None
    created_s: float
    """Seconds since 1970, as in the other times."""
    started_s: float | None = None
    finished_s: float | None = None
    usage: RunUsage = RunUsage()
    limits: Limits = Limits()
    parent: str | None = None
    """The id of the run that launched this one."""

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return not TRANSITIONS[self.status]


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a run's log."""

    at_s: float
    level: Literal["debug", "info", "warning", "error"]
    text: str


class Control(Protocol):
    """The interface to the executor of a run."""

    def deliver(self, message: bytes) -> None:
        """Send a message to the program. Never waits. Raises `Overloaded` or `LimitExceeded` if it does not fit."""

    def cancel(self, error: WeftError) -> None:
        """End the run with this error. Never waits."""

    def usage(self) -> RunUsage:
        """The usage so far, as far as this process knows it."""

    async def confirm(self) -> None:
        """Wait until the earlier calls have taken effect and `usage` is current. Raises the first refusal of a message
        delivered since the last call."""


class RunChange(NamedTuple):
    """One change of a run, as its watcher receives it. One field is set."""

    message: bytes | None = None
    line: LogLine | None = None
    status: Status | None = None


class Run:
    """One run. A host creates it; only the host calls the methods after `---- for its host`."""

    def __init__(self, spec: RunSpec, tenant: str, *, id: str = "", parent: str | None = None, model: str = ""):
        self.spec = spec
        self.result: bytes | None = None
        """JSON of the value that `main` returned, once the run has finished."""
        self.forgotten = False
        """Whether result, messages and log are no longer kept."""
        self.control: Control | None = None
        self.watcher: Callable[[Run, RunChange], None] | None = None
        """Called with every change as it happens. It must neither wait nor raise."""
        self.has_room: Callable[[], bool] = lambda: True
        """Whether the watcher can take more messages now."""
        code = spec.code
        self._record = RunRecord(
            id=id or new_run_id(),
            program=code.name,
            hash=code.hash,
            kind=code.kind,
            trusted=spec.trusted,
            tenant=tenant,
            model=model or spec.model,
            status="queued",
            created_s=time.time(),
            limits=spec.limits,
            parent=parent,
        )
        self._ended = asyncio.Event()
        self._listeners: set[Listener] = set()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._num_sent = 0
        self._num_received = 0
        self._log: deque[LogLine] = deque()
        self._log_bytes = 0
        self._lost_lines = 0

    @classmethod
    def described(cls, record: RunRecord) -> Run:
        """The run of a record, queued and without the content of its program."""
        code = Code(kind=record.kind, content=b"", hash=record.hash, name=record.program)
        spec = RunSpec(code=code, limits=record.limits, trusted=record.trusted, model=record.model)
        return cls(spec, record.tenant, id=record.id, parent=record.parent)

    @classmethod
    def restored(cls, record: RunRecord) -> Run:
        """A run that ended before this process started. Raises `ValueError` for a record without an end."""
        if not record.ended:
            raise ValueError(f"run {record.id} is {record.status}")
        run = cls.described(record)
        run._record, run.forgotten = record, True
        run._ended.set()
        return run

    @property
    def id(self) -> str:
        """The id of the run, unique among all runs."""
        return self._record.id

    @property
    def tenant(self) -> str:
        """The tenant that launched the run."""
        return self._record.tenant

    @property
    def status(self) -> Status:
        """The state of the run."""
        return self._record.status

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._record.ended

    def record(self) -> RunRecord:
        """The present record of the run."""
        if self.control is None or self.ended:
            return self._record
        return msgspec.structs.replace(self._record, usage=self._usage())

    async def wait(self) -> RunRecord:
        """Wait for the end and return the record. Several tasks may wait, and each may be cancelled."""
        await self._ended.wait()
        return self._record

    async def answer(self) -> bytes:
        """Wait for the end and return the JSON of the value that `main` returned. Raises the run's error, also
        `RunCancelled`."""
        record = await self.wait()
        if record.error is not None:
            raise record.error.error()
        return self.result or b"null"

    async def deliver(self, message: bytes) -> None:
        """Like `send`, but wait until the message has arrived, so that refusals by another process are raised too."""
        self.send(message)
        await self.refresh()

    async def refresh(self) -> None:
        """Update the usage in `record`. Raises `HostDead`."""
        if self.control is not None:
            await self.control.confirm()

    def send(self, message: bytes) -> None:
        """Send a message (JSON) to the program. Raises `RunEnded`, or the errors of `Control.deliver`. Does not wait,
        so a refusal by another process is not raised."""
        if self.ended or self.control is None:
            raise RunEnded(f"The run {self.id} is {self.status} and takes no messages.", "run")
        self.control.deliver(message)
        self._num_received += 1

    def messages(self) -> Listener:
        """The messages of the run: those that were kept, then all new ones until its end."""
        listener = Listener(self.id, list(self._kept), self._num_sent - len(self._kept), self._listeners.discard)
        if self.ended:
            listener.end(None)
        else:
            self._listeners.add(listener)
        return listener

    def cancel(self, reason: str = "the run was cancelled") -> None:
        """End the run as cancelled. Does nothing if it has ended."""
        if not self.ended and self.control is not None:
            self.control.cancel(RunCancelled(reason))

    def logs(self) -> list[LogLine]:
        """The lines of the log that are kept, oldest first."""
        return list(self._log)

    @property
    def lost_log_lines(self) -> int:
        """Number of older log lines that are no longer kept."""
        return self._lost_lines

    @property
    def kept_bytes(self) -> int:
        """Bytes kept beside the record: result, messages and log."""
        return len(self.result or b"") + self._kept_bytes + self._log_bytes

    # ---- for its host

    def start(self) -> None:
        """Record that the run has started."""
        self._advance("running", started_s=time.time())

    def emit(self, message: bytes) -> None:
        """Record a message of the program and pass it to the listeners. A listener that falls behind ends with
        `SlowListener`."""
        self._num_sent += 1
        self._kept.append(message)
        self._kept_bytes += len(message)
        while len(self._kept) > KEPT_MESSAGES or (self._kept_bytes > KEPT_MESSAGE_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft())
        for listener in list(self._listeners):
            if not listener.put(message):
                self._listeners.discard(listener)
        self._notify_watcher(RunChange(message=message))

    def log(self, line: LogLine) -> None:
        """Add a line to the run's log."""
        self._log.append(line)
        self._log_bytes += len(line.text) + LINE_COST_BYTES
        while self._log_bytes > KEPT_LOG_BYTES and len(self._log) > 1:
            self._log_bytes -= len(self._log.popleft().text) + LINE_COST_BYTES
            self._lost_lines += 1
        self._notify_watcher(RunChange(line=line))

    def finish(self, result: bytes) -> None:
        """End the run with its result."""
        self.result = result
        self._end("finished", None)

    def fail(self, error: WeftError) -> None:
        """End the run with an error: as cancelled for `RunCancelled`, else as failed. Does nothing if it has ended."""
        if not self.ended:
            self._end("cancelled" if isinstance(error, RunCancelled) else "failed", ErrorRecord.of(error))

    def adopt(self, record: RunRecord, result: bytes | None) -> None:
        """Take over the record of a run that ended elsewhere."""
        if not self.ended:
            self.result = result
            self._end(record.status, record.error, record)

    def drop_input(self) -> None:
        """Drop code and arguments: the host that executes the run has received them."""
        code = msgspec.structs.replace(self.spec.code, content=b"")
        self.spec = msgspec.structs.replace(self.spec, code=code, args=b"null")

    def drop_content(self) -> None:
        """Drop everything but the record of a run that ended long ago."""
        self.forgotten = True
        self.result = None
        self.drop_messages()

    def drop_messages(self) -> None:
        """Drop the messages and the log, which others keep."""
        self._kept.clear()
        self._log.clear()
        self._kept_bytes = self._log_bytes = 0

    # ---- inside

    def _advance(self, status: Status, **changes: object) -> None:
        if status not in TRANSITIONS[self.status]:
            raise RuntimeError(f"run {self.id} cannot go from {self.status} to {status}")
        self._record = msgspec.structs.replace(self._record, status=status, **changes)
        self._notify_watcher(RunChange(status=status))

    def _end(self, status: Status, error: ErrorRecord | None, known: RunRecord | None = None) -> None:
        usage = known.usage if known is not None else self._usage()
        started_s = known.started_s if known is not None else self._record.started_s
        # The usage is set before the end, so that a watcher that is notified of the end reads a complete record.
        self._advance(status, error=error, finished_s=time.time(), usage=usage, started_s=started_s)
        self.control = None
        self.drop_input()
        for listener in self._listeners:
            listener.end(None)
        self._listeners.clear()
        self._ended.set()

    def _usage(self) -> RunUsage:
        used = self.control.usage() if self.control is not None else RunUsage()
        return msgspec.structs.replace(used, messages_sent=self._num_sent, messages_received=self._num_received)

    def _notify_watcher(self, change: RunChange) -> None:
        if self.watcher is not None:
            self.watcher(self, change)


def new_run_id() -> str:
    """A new unguessable id, valid in logs, URLs and file names."""
    return "run-" + secrets.token_hex(12)


def log_line(level: int, text: str) -> LogLine:
    """A line of the log, from the level on the program's wire."""
    return LogLine(round(time.time(), 3), LEVELS[min(max(level, 0), 3)], text)  # type: ignore[arg-type]
