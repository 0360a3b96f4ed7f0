"""All messages as bytes: lists of commands one way, envelopes of events the other."""

from __future__ import annotations

import msgspec

from weft.core.wire import control, residency, sequences, spaces
from weft.core.wire.base import CommandBase, any_of
from weft.core.wire.events import Event

Command = CommandBase
COMMAND_MODULES = frozenset(module.__name__ for module in (control, residency, sequences, spaces))
"""Where commands are defined."""


def answered_op(command: Command) -> int | None:
    """The operation that a command begins, which ends in exactly one event; None of a command that is silent."""
    if isinstance(command, sequences.Append):
        return command.op if command.outputs is not None else None
    if isinstance(command, sequences.Expect | sequences.Hold):
        return command.op or None
    answered = sequences.Generate | spaces.AnsweredCommand | residency.ResidencyCommand | residency.EndRetain
    return command.op if isinstance(command, answered) else None


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """All events of one step for one client. Step 0: answers to commands, outside any step."""

    step_id: int
    events: list[Event]


_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(
    list[any_of(CommandBase, COMMAND_MODULES)]  # type: ignore[misc]
)
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
