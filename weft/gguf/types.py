"""The types that tensors of a GGUF file may have: number, name, and the size of a block; and types of blocks that
only weights from other files are put in.

The layouts of the blocks are the matter of `weft.kernels.quantized_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TensorType(NamedTuple):
    """A type whose tensors consist of blocks of consecutive numbers of a row; plain floats are blocks of one."""

    name: str
    numbers: int
    """Numbers of a block."""
    num_bytes: int
    """Bytes of a block."""


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""By number; those that are supported."""
GROUPS: Mapping[str, TensorType] = {
    "INT4_G32": TensorType("INT4_G32", 32, 24),
    "INT4_G128": TensorType("INT4_G128", 128, 72),
}
"""Groups of numbers of 4 bits, which no GGUF file has."""
BY_NAME: Mapping[str, TensorType] = {**{kind.name: kind for kind in TYPES.values()}, **GROUPS}
PACKED_ROWS = 32
PACKED_BYTES: Mapping[str, int] = {
    "Q8_0": 1088,
    "Q4_0": 576,
    "Q4_K": 4736,
    "Q5_K": 5760,
    "Q6_K": 6720,
    "INT4_G32": 672,
    "INT4_G128": 2208,
}
"""Bytes that `PACKED_ROWS` blocks take, one of each of as many rows, in the order in which kernels read them; of the
types for which there are kernels."""
AS_OTHERS: Mapping[str, str] = {"Q5_0": "Q8_0"}
"""Types without kernels of their own -> a type whose blocks hold theirs exactly."""
TYPE_NAMES = tuple(kind.name for kind in TYPES.values())

REFUSED: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the format's other types."""
REMOVED: Mapping[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
"""Names of types that the format had."""


def block_type(kind: str) -> str | None:
    """The type of blocks that kernels may multiply with in place of blocks of a type, without loss: another one for
    those of `AS_OTHERS`; None for plain numbers."""
    return None if BY_NAME[kind].numbers == 1 else AS_OTHERS.get(kind, kind)
