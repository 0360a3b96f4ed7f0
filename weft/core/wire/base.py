"""What all messages between clients and engines have in common.

A message is an array: its class's name, then its fields in their order. A field that is added goes last and has a
default, so that what does not know it can still be read; any other change of a layout is a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 4


class CommandBase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the commands that a client sends."""


class EventBase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a client hears back."""
