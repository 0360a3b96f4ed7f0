"""What all messages between clients and engines have in common.

A message is an array: its class's name, then its fields in their order. A field that is added goes last and has a
default, so that what does not know it can still be read; any other change of a layout is a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import msgspec

PROTOCOL_VERSION = 14


class CommandBase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the commands that a client sends."""


class EventBase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the events that a client receives."""


M = TypeVar("M")


def concrete(base: type[M], modules: Collection[str]) -> Iterator[type[M]]:
    """The messages of some modules, by name, that are derived from a base: classes that nothing is derived from."""
    for cls in base.__subclasses__():
        if cls.__subclasses__():
            yield from concrete(cls, modules)
        elif cls.__module__ in modules:
            yield cls


def any_of(base: type[object], modules: Collection[str]) -> Any:
    """The type of those messages for a decoder, which takes no others."""
    return functools.reduce(operator.or_, concrete(base, modules))
