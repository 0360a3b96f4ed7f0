"""GGUF files put together by hand, right or wrong in every field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def texts(key: str, *values: str | bytes) -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(string, values)))


class Forged(NamedTuple):
    """A tensor as a header describes it."""

    name: str | bytes = "a"
    shape: Sequence[int] = (4,)
    """As in the file: the length of a row first."""
    kind: int = 0
    offset: int = 0

    def packed(self) -> bytes:
        shape = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        return string(self.name) + shape + struct.pack("<IQ", self.kind, self.offset)


def forge(
    entries: Sequence[bytes] = (),
    tensors: Sequence[Forged] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    if num_tensors is None:
        num_tensors = len(tensors)
    if num_entries is None:
        num_entries = len(entries)
    header = (
        magic
        + struct.pack("<IQQ", version, num_tensors, num_entries)
        + b"".join(entries)
        + b"".join(t.packed() for t in tensors)
    )
    return header + b"\0" * (-len(header) % alignment) + data
