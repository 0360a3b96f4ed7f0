"""All messages as bytes: lists of commands one way, envelopes of events the other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.core.wire import control, sequences, spaces
from weft.core.wire.base import CommandBase
from weft.core.wire.events import Event

Command = CommandBase
COMMAND_MODULES = (control, sequences, spaces)
"""Where commands are defined: each class there below `CommandBase` that nothing is derived from is one."""


def answered_op(command: Command) -> int | None:
    """The operation that a command begins, which ends in exactly one event; None of a command that is silent."""
    if isinstance(command, sequences.Append):
        return command.op if command.outputs is not None else None
    return command.op if isinstance(command, sequences.Generate | spaces.AnsweredCommand) else None


def concrete(base: type[CommandBase]) -> Iterator[type[CommandBase]]:
    """The commands of `COMMAND_MODULES` that are derived from a base."""
    modules = {module.__name__ for module in COMMAND_MODULES}
    for cls in base.__subclasses__():
        if cls.__subclasses__():
            yield from concrete(cls)
        elif cls.__module__ in modules:
            yield cls


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """All events of one step for one client. Step 0: answers to commands, outside any step."""

    step_id: int
    events: list[Event]


_encoder = msgspec.msgpack.Encoder()
_every_command: Any = functools.reduce(operator.or_, concrete(CommandBase))
_commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(list[_every_command])
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
