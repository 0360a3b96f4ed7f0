"""What a front says to its program host, and what it hears back; and what the host is told on its standard input.

Each message is one struct in msgpack. Runs are named by their ids, which the front gives to those that it launches and
the host to their children. A question carries a number (`call`), and its `Answer` the same. Of one run, the host tells
`Began`, any number of `Said` and `Logged`, and `Ended`, in that order, and nothing after it.

A program may say more than the front can take: the host sends no more than `WINDOW_BYTES` of a run's messages before
the front has said, with `Read`, that it took them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.abi.errors import WeftError, from_kind
from weft.config import ProgramsConfig
from weft.programs.registry import Code
from weft.programs.run.runs import LogLine, RunFailure, RunRecord, RunSpec, RunUsage

WINDOW_BYTES = 4 << 20
READ_EVERY_BYTES = 256 << 10


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that programs may use, by its place in `HostArgs.models`."""

    name: str
    model: str
    """As `EngineConfig.model`: where its tokenizer comes from."""
    revision: str | None = None
    offline: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class HostArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent says on stdin, as one line of JSON."""

    models: list[HostedModel]
    config: ProgramsConfig
    store_path: str | None = None
    """None: what programs store is kept in memory."""
    log_level: str = "warning"


class ErrorTold(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses between the processes."""

    kind: str
    message: str
    param: str | None = None
    traceback: str = ""
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: WeftError) -> ErrorTold:
        """An error as it is sent."""
        kept = RunFailure.of(error)
        return cls(kept.kind, kept.message, kept.param, kept.traceback, error.retry_after_s)

    def error(self) -> WeftError:
        """The error of this kind, rebuilt."""
        return from_kind(
            self.kind, self.message, param=self.param, traceback=self.traceback, retry_after_s=self.retry_after_s
        )


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# ---- from the front


class Attach(_Message, frozen=True):
    """A model's engine is at this address now."""

    model: int
    address: str


class Detach(_Message, frozen=True):
    """A model's engine is gone."""

    model: int
    message: str


class Launch(_Message, frozen=True):
    """Start a run. The host replies with an `Answer`."""

    call: int
    run: str
    spec: RunSpec
    tenant: str
    namespace: str
    request_id: str
    priority: int


class Deliver(_Message, frozen=True):
    """A message for a run."""

    run: str
    message: bytes


class Confirm(_Message, frozen=True):
    """Ask whether what was delivered has arrived, and what the run has used. Answered."""

    call: int
    run: str


class CancelRun(_Message, frozen=True):
    """End a run with this error."""

    run: str
    error: ErrorTold


class Read(_Message, frozen=True):
    """So many bytes of a run's messages were taken."""

    run: str
    num_bytes: int


class Found(_Message, frozen=True):
    """Reply to `Find`: the program, or an error."""

    call: int
    found: Code | None
    error: ErrorTold | None = None


class Ping(_Message, frozen=True):
    """Asks the host for a `Pong`."""


FromFront = Attach | Detach | Launch | Deliver | Confirm | CancelRun | Read | Found | Ping


# ---- from the host


class Ready(_Message, frozen=True):
    """The host takes runs from now on."""


class Unusable(_Message, frozen=True):
    """The host cannot start, and ends."""

    error: ErrorTold


class Answer(_Message, frozen=True):
    """Reply to `Launch` or `Confirm` of the same number."""

    call: int
    error: ErrorTold | None = None
    usage: RunUsage | None = None


class Began(_Message, frozen=True):
    """A run that a program launched exists; the front knows of its own."""

    record: RunRecord


class Running(_Message, frozen=True):
    """A run has begun to run."""

    run: str


class Said(_Message, frozen=True):
    """A message that a run sent, as JSON."""

    run: str
    message: bytes


class Logged(_Message, frozen=True):
    """A line of a run's log."""

    run: str
    line: LogLine


class Ended(_Message, frozen=True):
    """The end of a run."""

    record: RunRecord
    result: bytes | None


class Find(_Message, frozen=True):
    """What a program that wants to launch another one means by this. Answered with `Found`."""

    call: int
    tenant: str
    reference: str


class Pong(_Message, frozen=True):
    """Reply to `Ping`: the host is alive."""

    num_runs: int
    state: Literal["serving"] = "serving"


FromHost = Ready | Unusable | Answer | Began | Running | Said | Logged | Ended | Find | Pong

_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(FromFront)
_from_host = msgspec.msgpack.Decoder(FromHost)


def encode(message: FromFront | FromHost) -> bytes:
    """Encode a message in msgpack."""
    return _encoder.encode(message)


def decode_from_front(data: bytes) -> FromFront:
    """The inverse of `encode`. Raises `msgspec.ValidationError`."""
    message: FromFront = _from_front.decode(data)
    return message


def decode_from_host(data: bytes) -> FromHost:
    """The inverse of `encode`. Raises `msgspec.ValidationError`."""
    message: FromHost = _from_host.decode(data)
    return message
