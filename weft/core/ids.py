"""Token ids as packed bytes.

Token ids cross sockets and index structures as little-endian int32 bytes: a 140,000-token prompt is one memory copy,
and equal prefixes are equal bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4

if array("i").itemsize != TOKEN_BYTES or sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Weft packs token ids as little-endian int32, which this platform's array('i') is not")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes. Raises `OverflowError` for ids that are not int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """The inverse of `pack_tokens`. Raises `ValueError` when the length is not a multiple of four bytes."""
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens
