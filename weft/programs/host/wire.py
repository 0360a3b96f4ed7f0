"""The messages between a front and its program host, and the arguments that the host reads on its standard input.

Each message is one struct in msgpack. Runs are named by their ids, which the front gives to the runs that it launches
and the host to their children. A message that asks for a reply carries a number (`call`), and its reply the same. Of
one run, the host sends `RunCreated`, any number of `MessageSent` and `LineLogged`, and `RunOver`, in that order, and
nothing after it.

A program may send more than the front can take: the host sends no more than `WINDOW_BYTES` of a run's messages before
the front has acknowledged them with `MessagesTaken`.
"""

from __future__ import annotations

import msgspec

from weft.config import ProgramsConfig
from weft.core.wire import ErrorRecord
from weft.core.wire.base import any_of
from weft.programs.registry import Code
from weft.programs.run.runs import LogLine, RunRecord, RunSpec, RunUsage
from weft.programs.types import Caller

WINDOW_BYTES = 4 << 20
READ_EVERY_BYTES = 256 << 10


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that programs may use, by its place in `HostArgs.models`."""

    name: str
    model: str
    """The folder or hub id from which the tokenizer is loaded, as `EngineConfig.model`."""
    revision: str | None = None
    offline: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class HostArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the host process: one line of JSON on its standard input."""

    models: list[HostedModel]
    config: ProgramsConfig
    store_folder: str | None = None
    """The folder of the database; None: the values that programs store are kept in memory."""
    log_level: str = "warning"
    engine_wait_s: float = 0.0
    """How long operations of programs wait for the restart of a dead engine."""


# ---- from the front


class FromFront(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages that the front sends."""


class AttachEngine(FromFront, frozen=True):
    """The address at which a model's engine listens now."""

    model: int
    address: str


class DetachEngine(FromFront, frozen=True):
    """The engine of a model is down."""

    model: int
    message: str


class LaunchRun(FromFront, frozen=True):
    """Start a run. The host replies with `CallAnswered`."""

    call: int
    run: str
    spec: RunSpec
    caller: Caller


class DeliverMessage(FromFront, frozen=True):
    """A message for a run."""

    run: str
    message: bytes


class QueryRun(FromFront, frozen=True):
    """Ask whether the messages sent before have arrived, and what the run has used. Replied with `CallAnswered`."""

    call: int
    run: str


class CancelRun(FromFront, frozen=True):
    """End a run with this error."""

    run: str
    error: ErrorRecord


class MessagesTaken(FromFront, frozen=True):
    """The front has taken so many bytes of a run's messages."""

    run: str
    num_bytes: int


class ProgramFound(FromFront, frozen=True):
    """Reply to `FindProgram`: the program, or an error."""

    call: int
    program: Code | None
    error: ErrorRecord | None = None


class ChargeTenant(FromFront, frozen=True):
    """Charge processor time that the front spent for a tenant to the tenant's rate."""

    tenant: str
    cpu_s: float


class PingHost(FromFront, frozen=True):
    """Asks the host for `HostAlive`."""


# ---- from the host


class FromHost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages that the host sends."""


class HostReady(FromHost, frozen=True):
    """The host takes runs from now on."""


class HostFailed(FromHost, frozen=True):
    """The host cannot start, and ends."""

    error: ErrorRecord


class CallAnswered(FromHost, frozen=True):
    """Reply to `LaunchRun` or `QueryRun` of the same number."""

    call: int
    error: ErrorRecord | None = None
    usage: RunUsage | None = None


class RunCreated(FromHost, frozen=True):
    """A program has launched a run; the front knows the runs that it launched itself."""

    record: RunRecord


class RunStarted(FromHost, frozen=True):
    """The host has begun to execute a run."""

    run: str


class MessageSent(FromHost, frozen=True):
    """A message that a run sent, as JSON."""

    run: str
    message: bytes


class LineLogged(FromHost, frozen=True):
    """A line of a run's log."""

    run: str
    line: LogLine


class RunOver(FromHost, frozen=True):
    """The last message about a run: it has ended."""

    record: RunRecord
    result: bytes | None


class FindProgram(FromHost, frozen=True):
    """Ask for the program that a name or hash means for a tenant. Replied with `ProgramFound`."""

    call: int
    tenant: str
    reference: str


class HostAlive(FromHost, frozen=True):
    """Reply to `PingHost` from the host's event loop."""

    num_runs: int


_encoder = msgspec.msgpack.Encoder()
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(any_of(FromFront, {__name__}))
_from_host: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(any_of(FromHost, {__name__}))


def encode(message: FromFront | FromHost) -> bytes:
    """Encode a message in msgpack."""
    return _encoder.encode(message)


def decode_from_front(data: bytes) -> FromFront:
    """The inverse of `encode`. Raises `msgspec.ValidationError`."""
    return _from_front.decode(data)


def decode_from_host(data: bytes) -> FromHost:
    """The inverse of `encode`. Raises `msgspec.ValidationError`."""
    return _from_host.decode(data)
