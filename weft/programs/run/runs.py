"""One run of a program, as everybody who has to do with it sees it: its state, its messages, its log, its end.

Owns the one table of states, the one ending, and what is kept for those who ask later; all of it bounded. It does not
know what carries a run out: a `Control` does, in this process (`weft.programs.host`) or in another one
(`weft.programs.host.client`). Used from one event loop.

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
"""Of a run that nobody listens to; the oldest go first."""
KEPT_MESSAGE_BYTES = 1 << 20
KEPT_LOG_BYTES = 256 << 10
"""Of each run's log; the oldest lines go first."""
LINE_COST_BYTES = 64
"""What a line of a log costs beside its text, so that empty ones are bounded too."""
LEVELS = ("debug", "info", "warning", "error")


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how."""

    code: Code
    args: bytes = b"null"
    """JSON."""
    limits: Limits = Limits()
    trusted: bool = False
    """Without a sandbox: where the host allows it."""
    model: str = ""
    """One of the host's; empty: its first."""
    reserve_pages: int = 0
    """KV pages that it has from the start."""


class RunUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has used so far."""

    cpu_s: float = 0.0
    """Processor time of its own code and of its host on its behalf, its children's included."""
    memory_bytes: int = 0
    """The most its sandbox held at once, of Wasm modules. 0 of programs in Python: the engine shows the memory of
    components to nobody."""
    host_calls: int = 0
    prompt_tokens: int = 0
    """Put on sequences and forwards."""
    cached_tokens: int = 0
    """Of those, found instead of computed."""
    generated_tokens: int = 0
    waited_s: float = 0.0
    """For anything but the model: HTTP, messages, children, sleeping."""
    throttled_s: float = 0.0
    """Of its time, how long its commands were held back because its tenant's programs had used up a rate."""
    http_requests: int = 0
    children: int = 0
    pages_peak: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a run. Holds neither arguments nor messages."""

    id: str
    program: str
    """The name it was run by; empty where it was never uploaded."""
    hash: str
    kind: ProgramKind
    trusted: bool
    tenant: str
    model: str
    status: Status
    error: ErrorRecord | None = None
    created_s: float
    """Seconds since 1970, as the others."""
    started_s: float | None = None
    finished_s: float | None = None
    usage: RunUsage = RunUsage()
    limits: Limits = Limits()
    parent: str | None = None
    """The run that launched it."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return not TRANSITIONS[self.status]


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a run's log."""

    at_s: float
    level: Literal["debug", "info", "warning", "error"]
    text: str


class Control(Protocol):
    """What carries a run out."""

    def deliver(self, message: bytes) -> None:
        """Give it a message. Never waits. Raises `Overloaded` or `LimitExceeded` where it does not fit."""

    def cancel(self, error: WeftError) -> None:
        """End it with this error; never waits."""

    def usage(self) -> RunUsage:
        """What it has used so far, as far as is known here."""

    async def confirm(self) -> None:
        """Wait until what was asked before has been carried out, and `usage` is of now. Raises the first refusal of
        what was delivered since the last call."""


class RunChange(NamedTuple):
    """One change of a run, as its watcher gets it: one field is set."""

    message: bytes | None = None
    line: LogLine | None = None
    status: Status | None = None


class Run:
    """See the module's docstring. Made by a host; the methods after `---- for its host` are called by that alone."""

    def __init__(self, spec: RunSpec, tenant: str, *, id: str = "", parent: str | None = None, model: str = ""):
        self.spec = spec
        self.result: bytes | None = None
        """JSON of what `main` returned, once it has finished."""
        self.forgotten = False
        """Whether its result, messages and log are no longer kept."""
        self.control: Control | None = None
        self.watcher: Callable[[Run, RunChange], None] | None = None
        """Told of everything, as it happens; must neither wait nor raise."""
        self.has_room: Callable[[], bool] = lambda: True
        """Whether its watcher can take more messages now."""
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
    def restored(cls, record: RunRecord) -> Run:
        """One that ended before this process began. Raises `ValueError` for one that did not."""
        if not record.ended:
            raise ValueError(f"run {record.id} is {record.status}")
        code = Code(kind=record.kind, content=b"", hash=record.hash, name=record.program)
        spec = RunSpec(code=code, limits=record.limits, trusted=record.trusted, model=record.model)
        run = cls(spec, record.tenant, id=record.id, parent=record.parent)
        run._record, run.forgotten = record, True
        run._ended.set()
        return run

    @property
    def id(self) -> str:
        """Never that of another run."""
        return self._record.id

    @property
    def tenant(self) -> str:
        """The tenant that launched the run."""
        return self._record.tenant

    @property
    def status(self) -> Status:
        """Where it is in its life."""
        return self._record.status

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._record.ended

    def record(self) -> RunRecord:
        """What is known of it now."""
        if self.control is None or self.ended:
            return self._record
        return msgspec.structs.replace(self._record, usage=self._usage())

    async def wait(self) -> RunRecord:
        """Its record, when it is over. May be called by many, and cancelled."""
        await self._ended.wait()
        return self._record

    async def answer(self) -> bytes:
        """JSON of what `main` returned. Raises what it failed with, `RunCancelled` too."""
        record = await self.wait()
        if record.error is not None:
            raise record.error.error()
        return self.result or b"null"

    async def deliver(self, message: bytes) -> None:
        """`send`, and wait until it has arrived. Raises as that, also where the run is carried out elsewhere."""
        self.send(message)
        await self.refresh()

    async def refresh(self) -> None:
        """Have `record` tell what has been used until now. Raises `HostDead`."""
        if self.control is not None:
            await self.control.confirm()

    def send(self, message: bytes) -> None:
        """Give it a message (JSON). Raises `RunEnded`, or what its control raises. Does not wait, so that a refusal by
        another process is not heard."""
        if self.ended or self.control is None:
            raise RunEnded(f"The run {self.id} is {self.status} and takes no messages.", "run")
        self.control.deliver(message)
        self._num_received += 1

    def messages(self) -> Listener:
        """Its messages: those that were kept from before, then all that come, until it ends."""
        listener = Listener(self.id, list(self._kept), self._num_sent - len(self._kept), self._listeners.discard)
        if self.ended:
            listener.end(None)
        else:
            self._listeners.add(listener)
        return listener

    def cancel(self, reason: str = "the run was cancelled") -> None:
        """End it. Does nothing where it is over."""
        if not self.ended and self.control is not None:
            self.control.cancel(RunCancelled(reason))

    def logs(self) -> list[LogLine]:
        """The last lines of its log, oldest first."""
        return list(self._log)

    @property
    def lost_log_lines(self) -> int:
        """Older lines that are no longer kept."""
        return self._lost_lines

    @property
    def kept_bytes(self) -> int:
        """What is kept of it beside its record: result, messages, log."""
        return len(self.result or b"") + self._kept_bytes + self._log_bytes

    # ---- for its host

    def start(self) -> None:
        """The run has started."""
        self._advance("running", started_s=time.time())

    def emit(self, message: bytes) -> None:
        """It said something. A listener that has not read for too long is given up with `SlowListener`."""
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
        """It ended with an error; was cancelled, if it is `RunCancelled`. Does nothing where it is over."""
        if not self.ended:
            self._end("cancelled" if isinstance(error, RunCancelled) else "failed", ErrorRecord.of(error))

    def adopt(self, record: RunRecord, result: bytes | None) -> None:
        """Take over the record of a run that ended elsewhere."""
        if not self.ended:
            self.result = result
            self._end(record.status, record.error, record)

    def drop_input(self) -> None:
        """Forget code and arguments: the host that carries the run out has them, or has had them."""
        code = msgspec.structs.replace(self.spec.code, content=b"")
        self.spec = msgspec.structs.replace(self.spec, code=code, args=b"null")

    def drop_content(self) -> None:
        """Keep the record alone: it is long over."""
        self.forgotten = True
        self.result = None
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
        # The usage first, then the end: a watcher that hears of the end reads a record that is complete.
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
    """Unguessable, and the same in logs, addresses and file names."""
    return "run-" + secrets.token_hex(12)


def log_line(level: int, text: str) -> LogLine:
    """A line as it is kept, from the level on the program's wire."""
    return LogLine(round(time.time(), 3), LEVELS[min(max(level, 0), 3)], text)  # type: ignore[arg-type]
