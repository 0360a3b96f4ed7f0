"""All messages as bytes: lists of commands one way, envelopes of events the other."""

from __future__ import annotations

import msgspec

from weft.core.wire.control import Drain, Hello, Ping, ResetPrefixCache
from weft.core.wire.events import Event
from weft.core.wire.sequences import (
    Append,
    Cancel,
    Fork,
    Generate,
    Hold,
    MaskTokens,
    Open,
    Release,
    SetPriority,
    Truncate,
)
from weft.core.wire.spaces import Answered, SpaceCommand

SequenceCommand = Open | Append | Generate | Fork | Truncate | Hold | Release | Cancel | SetPriority | MaskTokens
Command = SequenceCommand | SpaceCommand | Hello | Ping | Drain | ResetPrefixCache


def is_answered(command: Command) -> bool:
    """Whether a command is an operation that ends in exactly one event."""
    if isinstance(command, Append):
        return command.outputs is not None
    return isinstance(command, Generate | Answered)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """All events of one step for one client. Step 0: answers to commands, outside any step."""

    step_id: int
    events: list[Event]


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_envelope = msgspec.msgpack.Decoder(Envelope)


def encode_commands(commands: list[Command]) -> bytes:
    """Encode commands as one message."""
    return _encoder.encode(commands)


def decode_commands(data: bytes) -> list[Command]:
    """The inverse of `encode_commands`. Raises `msgspec.ValidationError` for anything else."""
    return _commands.decode(data)


def encode_envelope(envelope: Envelope) -> bytes:
    """An envelope as one message."""
    return _encoder.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """The inverse of `encode_envelope`. Raises `msgspec.ValidationError` for anything else."""
    return _envelope.decode(data)
