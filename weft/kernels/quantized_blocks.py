"""Quantized blocks, expanded to float32: those of GGUF files, and groups of 4 bits as other formats have them.

A block holds consecutive numbers of a row: small integers, and scales for all or for groups of them. Layouts and
arithmetic are those that ggml defines (`ggml-common.h`, `dequantize_row_*` of `ggml-quants.c`). Products of a scale and
an integer are exact in float32 for all but Q6_K, so the order of operations matters only there, and follows ggml.

A block of `GROUPS` is a group of 32 or 128 numbers of 4 bits: a float32 scale, a zero point in one byte, three bytes of
0, and for each 32 numbers 16 bytes as in Q4_0. A number stands for (number - zero point) * scale.

Products that read blocks as they are: `block_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from weft.gguf.types import GROUPS

GROUP_HEADER = 8
"""Bytes before the numbers of a group."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose blocks are one number."""


def expand(kind: str, blocks: Tensor) -> Tensor:
    """blocks [n, bytes of a block] uint8, contiguous -> numbers [n, numbers of a block].

    float32, or the dtype of the type if its blocks are plain numbers. Raises `BadScale` where a block has a scale that
    is NaN or infinite.
    """
    return blocks.view(PLAIN[kind]) if kind in PLAIN else _EXPANDERS[kind](blocks)


def as_block_type(kind: str, blocks: Tensor) -> Tensor:
    """blocks [n, bytes of a block] uint8 -> the same numbers in blocks of `gguf.types.block_type`."""
    return _AS_OTHERS[kind](blocks) if kind in _AS_OTHERS else blocks


def check_scales(kind: str, blocks: Tensor) -> None:
    """Raise `BadScale` as `expand` does, for quantized blocks."""
    _scales(blocks, *SCALES[kind])


class BadScale(ValueError):
    """A block's scale is NaN or infinite."""

    def __init__(self, block: int):
        super().__init__(f"block {block} has a scale that is NaN or infinite")
        self.block = block
        """Its index."""


def _scales(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """float16 scales from byte `first` of each block on, [n, count] float32, checked."""
    scales = blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()
    if not math.isfinite(scales.sum()):  # a single pass: so many float16 numbers as fit in memory do not overflow it
        raise BadScale(int(scales.isfinite().all(1).logical_not().nonzero()[0]))
    return scales


def _nibbles(packed: Tensor) -> Tensor:
    """packed [..., k] uint8 -> the low halves of all, then the high halves, [..., 2, k]."""
    return torch.stack([packed & 15, packed >> 4], -2)


def _bits(packed: Tensor, width: int) -> Tensor:
    """packed [..., k] uint8 -> the lowest `width` bits of all, then the next, ..., [..., 8 / width, k]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
    return packed[..., None, :] >> shifts & ((1 << width) - 1)


def _fifth_bits(upper: Tensor) -> Tensor:
    """upper [n, 4] uint8 -> bit i of the 4 bytes where it is in a number, [n, 32]."""
    return _bits(upper, 1).transpose(1, 2).flatten(1) << 4


def stored_numbers(kind: str, blocks: Tensor) -> Tensor:
    """blocks [n, bytes of a block] uint8 -> their integers as they are stored, before any offset, [n, numbers of a
    block] uint8; those of Q8_0 are the bytes of int8.

    Q5_K has the fifth bit of number i of group g in bit g of byte i. Q6_K has two halves of 128 numbers, with 64 bytes
    of lower and 32 of upper bits: byte i of the latter has those of the numbers i, i + 32, i + 64 and i + 96.
    """
    match kind:
        case "Q8_0":
            return blocks[:, 2:]
        case "Q4_0" | "Q4_1":
            return _nibbles(blocks[:, -16:]).flatten(1)
        case "Q5_0" | "Q5_1":
            return _nibbles(blocks[:, -16:]).flatten(1) | _fifth_bits(blocks[:, -20:-16])
        case "Q4_K":
            return _nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1)
        case "Q5_K":
            lower = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
            return (lower | _bits(blocks[:, 16:48], 1) << 4).flatten(1)
        case "Q6_K":
            lower = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
            return (lower | _bits(blocks[:, 128:192].view(-1, 2, 32), 2) << 4).flatten(1)
        case _:
            return _nibbles(blocks[:, GROUP_HEADER:].view(len(blocks), -1, 16)).flatten(1)


def stored_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks of Q4_K or Q5_K, what the scale and the minimum of each of the 8 groups are multiplied with, each
    [n, 8] uint8.

    6 bits each, in 12 bytes: those of the groups 0 to 3 in one byte each, whose upper two bits belong to the groups 4
    to 7.
    """
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    return factors, torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)


def _scaled(kind: str, offset: int, blocks: Tensor) -> Tensor:
    """Numbers less an offset, and one scale."""
    return (stored_numbers(kind, blocks).view(torch.int8) - offset) * _scales(blocks, 0)


def _added(kind: str, blocks: Tensor) -> Tensor:
    """Numbers, a scale, and what is added to all."""
    scales = _scales(blocks, 0, 2)
    return stored_numbers(kind, blocks) * scales[:, :1] + scales[:, 1:]


def _q5_0_as_q8_0(blocks: Tensor) -> Tensor:
    """The same integers and scale."""
    return torch.cat([blocks[:, :2], stored_numbers("Q5_0", blocks) - 16], 1)


def _in_groups(kind: str, blocks: Tensor) -> Tensor:
    """8 groups of 32 numbers."""
    scales = _scales(blocks, 0, 2)
    factors, minima = stored_factors(blocks)
    values = stored_numbers(kind, blocks).view(-1, 8, 32)
    return (values * (factors * scales[:, :1])[..., None] - (minima * scales[:, 1:])[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 numbers of 6 bits, less 32, with an int8 scale each."""
    values = (stored_numbers("Q6_K", blocks).view(torch.int8) - 32).view(-1, 16, 16)
    factors = blocks[:, 192:208].view(torch.int8) * _scales(blocks, 208)
    return (values * factors[..., None]).flatten(1)


def _int4_groups(kind: str, blocks: Tensor) -> Tensor:
    """Groups of `GROUPS`."""
    scales = blocks[:, :4].contiguous().view(torch.float32)
    zeros = blocks[:, 4:5].to(torch.int16)
    return (stored_numbers(kind, blocks).to(torch.int16) - zeros) * scales


SCALES: Mapping[str, tuple[int, int]] = {
    "Q8_0": (0, 1),
    "Q4_0": (0, 1),
    "Q4_1": (0, 2),
    "Q5_0": (0, 1),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208, 1),
}
"""Where the float16 scales of a block begin, and how many there are."""
_EXPANDERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": partial(_scaled, "Q8_0", 0),
    "Q4_0": partial(_scaled, "Q4_0", 8),
    "Q4_1": partial(_added, "Q4_1"),
    "Q5_0": partial(_scaled, "Q5_0", 16),
    "Q5_1": partial(_added, "Q5_1"),
    "Q4_K": partial(_in_groups, "Q4_K"),
    "Q5_K": partial(_in_groups, "Q5_K"),
    "Q6_K": _q6_k,
    **{kind: partial(_int4_groups, kind) for kind in GROUPS},
}
_AS_OTHERS: Mapping[str, Callable[[Tensor], Tensor]] = {"Q5_0": _q5_0_as_q8_0}
"""For each of `gguf.types.AS_OTHERS`, its blocks -> those of the other type."""
