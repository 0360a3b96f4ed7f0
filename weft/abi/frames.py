"""The frames that travel between a program and its host: packed bytes, the same for Python, C and Rust, trusted or not.

A message is any number of frames, one after the other; everything is little-endian:

    command   u32 size of what follows | u8 operation | u32 call | numbers | u32 length of each blob | blobs
    event     u32 size of what follows | u8 kind      | u32 call | u8 blobs | u32 length of each blob | blobs

The numbers and blobs of each operation are those of `weft.abi.operations`. A call that answers ends with exactly one
`RESULT` or `ERROR` event of its number, after any number of `PART` events; a call that does not answer has an event
only when it fails, an `ERROR`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from weft.abi.errors import LimitExceeded
from weft.abi.operations import MAX_COMMAND_BYTES, Op

VERSION = 1


class EventKind(IntEnum):
    """The kinds of events that a host sends."""

    RESULT = 0
    """The call ended well."""
    ERROR = 1
    """The call failed: kind (one of `weft.abi.errors`); message; the field or limit at fault, or nothing."""
    PART = 2
    """A piece of the call's answer."""


class _Packing(NamedTuple):
    """How a command is packed."""

    op: Op
    head: struct.Struct
    """Size, operation, call, numbers, and the length of each blob."""
    num_numbers: int


_PACKINGS = {op: _Packing(op, struct.Struct(f"<IBI{op.numbers}{op.num_blobs}I"), len(op.numbers)) for op in Op}
"""By operation; an operation equals its number, so a number finds its entry too."""
_SIZE = struct.Struct("<I")
_EVENT = struct.Struct("<IBIB")
_LENGTHS = [struct.Struct(f"<{count}I") for count in range(256)]
"""Of an event's blobs, by how many there are."""
_KINDS = tuple(EventKind)


class WireError(ValueError):
    """Bytes that are not a valid message. Their sender is at fault."""


class CommandFrame(NamedTuple):
    """One command, as its host reads it."""

    op: Op
    call: int
    numbers: tuple[int | float, ...]
    blobs: list[bytes]


class EventFrame(NamedTuple):
    """One event, as a program reads it."""

    kind: EventKind
    call: int
    blobs: list[bytes]


def pack(op: Op, call: int, *values: float | bytes) -> bytes:
    """Pack one command: its numbers, then its blobs, in the order of the table. Raises `struct.error` for a number that
    does not fit, and `LimitExceeded` for more than `MAX_COMMAND_BYTES`."""
    _, head, num_numbers = _PACKINGS[op]
    size = head.size - _SIZE.size
    if len(values) == num_numbers:
        return head.pack(size, op, call, *values)
    blobs: tuple[bytes, ...] = values[num_numbers:]  # type: ignore[assignment]
    size += sum(map(len, blobs))
    if size > MAX_COMMAND_BYTES:
        raise LimitExceeded(f"{_excess(op, size)}; send less at once", "command_bytes")
    return b"".join((head.pack(size, op, call, *values[:num_numbers], *map(len, blobs)), *blobs))


def commands(data: bytes) -> Iterator[CommandFrame]:
    """The commands of a message. Raises `WireError` at the first invalid frame."""
    start, end = 0, len(data)
    while start < end:
        if end - start < 9:
            raise WireError(f"{end - start} bytes are not a command")
        size = _SIZE.unpack_from(data, start)[0]
        packing = _PACKINGS.get(data[start + 4])  # type: ignore[call-overload]
        if packing is None:
            raise WireError(f"there is no operation {data[start + 4]}")
        op, head, num_numbers = packing
        stop = start + _SIZE.size + size
        body = start + head.size
        if size > MAX_COMMAND_BYTES:
            raise WireError(_excess(op, size))
        if stop > end or body > stop:
            raise WireError(f"a frame of {op.name} has a wrong size, {size} bytes")
        fields = head.unpack_from(data, start)
        split = 3 + num_numbers
        yield CommandFrame(op, fields[2], fields[3:split], _blobs(data, body, stop, fields[split:]))
        start = stop


def pack_event(kind: EventKind, call: int, *blobs: bytes) -> bytes:
    """Pack one event: kind, call number and blobs."""
    lengths = _LENGTHS[len(blobs)]
    size = _EVENT.size - _SIZE.size + lengths.size + sum(map(len, blobs))
    return b"".join((_EVENT.pack(size, kind, call, len(blobs)), lengths.pack(*map(len, blobs)), *blobs))


def events(data: bytes) -> Iterator[EventFrame]:
    """The events of a message. Raises `WireError` at the first invalid frame."""
    start, end = 0, len(data)
    while start < end:
        if end - start < _EVENT.size:
            raise WireError(f"{end - start} bytes are not an event")
        size, kind, call, count = _EVENT.unpack_from(data, start)
        lengths = _LENGTHS[count]
        stop = start + _SIZE.size + size
        body = start + _EVENT.size + lengths.size
        if stop > end or body > stop or kind >= len(_KINDS):
            raise WireError(f"a frame of an event has a wrong size, {size} bytes")
        yield EventFrame(_KINDS[kind], call, _blobs(data, body, stop, lengths.unpack_from(data, start + _EVENT.size)))
        start = stop


def _excess(op: Op, size: int) -> str:
    return f"the command {op.name} has {size} bytes; the limit is {MAX_COMMAND_BYTES}"


def _blobs(data: bytes, start: int, stop: int, lengths: tuple[int, ...]) -> list[bytes]:
    blobs = []
    for length in lengths:
        blobs.append(data[start : start + length])
        start += length
    if start != stop:
        raise WireError("the lengths of a frame's blobs do not add up to its size")
    return blobs
