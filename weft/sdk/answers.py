"""Awaitable answers of the host, and the packing of numbers for the wire.

A function of the library that asks the host something is a plain function, not a coroutine: it sends its command before
it returns, so that a program can send many commands before it awaits the first answer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from weft.abi.errors import InvalidRequest
from weft.sdk.calls import Blobs, Call

T = TypeVar("T")
_INT, _HANDLE = struct.Struct("<i"), struct.Struct("<I")


class Answer(Generic[T]):
    """An awaitable answer of the host. Its command has been sent; awaiting it returns the decoded result."""

    __slots__ = ("_call", "_decode")

    def __init__(self, call: Call, decode: Callable[[Blobs], T]):
        self._call = call
        self._decode = decode

    def __await__(self) -> Generator[Any, None, T]:
        call = self._call
        if not call.ended:
            yield from call.wait()
        return self._decode(call.outcome())

    @property
    def ended(self) -> bool:
        """Whether the answer has arrived, so that awaiting it returns at once."""
        return self._call.ended

    def cancel(self) -> None:
        """Cancel the call. Awaiting it then raises `Cancelled`, unless the call has ended."""
        self._call.cancel()


def nothing(blobs: Blobs) -> None:
    """Decode an answer that has no content."""


def text_of(blobs: Blobs) -> str:
    """Decode an answer that is UTF-8 text."""
    return blobs[0].decode("utf-8", "replace")


def json_of(blobs: Blobs) -> Any:
    """Decode an answer that is JSON."""
    return json.loads(blobs[0])


def ids_of(blobs: Blobs) -> list[int]:
    """Decode an answer that is token ids."""
    return unpack_ints(blobs[0])


def pack_ints(values: Iterable[int]) -> bytes:
    """Pack token ids or positions as int32. Raises `InvalidRequest` for a value that is not a 32-bit integer."""
    numbers = list(values)
    try:
        if len(numbers) == 1:
            return _INT.pack(numbers[0])
        return struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error:
        bad = next((value for value in numbers if not _is_int32(value)), numbers[:1])
        raise InvalidRequest(f"token ids and positions are integers of 32 bits, got {bad!r}") from None


def unpack_ints(data: bytes) -> list[int]:
    """Unpack little-endian int32 values to a list."""
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def pack_handles(numbers: list[int]) -> bytes:
    """Pack the numbers of pages or embeddings as uint32."""
    if len(numbers) == 1:
        return _HANDLE.pack(numbers[0])
    return struct.pack(f"<{len(numbers)}I", *numbers) if numbers else b""


def unpack_floats(data: bytes) -> list[float]:
    """Unpack little-endian float32 values to a list."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def dump(value: object) -> bytes:
    """Encode a value made by the library as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _is_int32(value: object) -> bool:
    return isinstance(value, int) and -(2**31) <= value < 2**31
