"""Weights in quantized blocks as models hold them, and the product with them in plain torch.

Activations meet such a weight in 8 bits: rows are quantized in blocks (`quantize_rows`), products are sums of integers,
and scales meet the sums. The blocks are those that llama.cpp quantizes activations in, so that the same file gives
nearly the same logits. Kernels for devices, and those for many rows on processors with matrix tiles, do not round
activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from weft.gguf.types import BY_NAME, GROUPS, PACKED_BYTES, PACKED_ROWS
from weft.kernels.quantized_blocks import expand

PANEL = PACKED_ROWS
"""Outputs that a packed weight takes at a time."""
LARGEST = 127
"""Of a quantized activation, in both directions."""
LEAST_MAGNITUDE = 2.0**-100
"""A block of activations without a magnitude as large as this is zeros: the inverse of its scale may overflow."""
BLOCK_TYPES = {kind: number for number, kind in enumerate(PACKED_BYTES, 1)}
"""Types that kernels multiply with: their numbers in the library (`BlockType`)."""


class BlockPart(NamedTuple):
    """Consecutive outputs of a weight whose blocks are of one type."""

    kind: str
    """As in `quantized_blocks`."""
    outputs: int


class BlockWeight(Tensor):
    """A weight [O, I] in quantized blocks: a uint8 tensor of one dimension that knows what its bytes are.

    Not packed, it is its parts one after the other, each [outputs, blocks of a row, bytes of a block] as
    `quantized_blocks` describes them. Only `linear`, `gated_linear`, `linear_rms_norm`, `take_rows` and `pack_weight`
    read it.
    """

    parts: tuple[BlockPart, ...]
    """From the first output on; neighbours are of different types."""
    inputs: int
    packed: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # makes plain tensors of it

    @classmethod
    def of(cls, data: Tensor, parts: Sequence[BlockPart], inputs: int, *, packed: bool = False) -> Self:
        """The weight whose bytes are `data`. Raises `ValueError` if they are too many or too few."""
        weight = data.as_subclass(cls)
        weight.parts, weight.inputs, weight.packed = merged(parts), inputs, packed
        if data.dtype != torch.uint8 or data.shape != (sum(weight._sizes()),):
            raise ValueError(f"{data.dtype} {list(data.shape)} for {weight.parts} of {inputs} inputs")
        return weight

    @property
    def outputs(self) -> int:
        """Output channels: the rows of all parts together."""
        return sum(part.outputs for part in self.parts)

    def data_of_parts(self) -> list[Tensor]:
        """The bytes of each part, as views."""
        return list(torch.split(self, self._sizes()))

    def _sizes(self) -> list[int]:
        size_of = packed_size if self.packed else stored_size
        return [size_of(part, self.inputs) for part in self.parts]


def merged(parts: Sequence[BlockPart]) -> tuple[BlockPart, ...]:
    """The same outputs, with neighbours of one type as one part."""
    found: list[BlockPart] = []
    for part in parts:
        if found and found[-1].kind == part.kind:
            part = BlockPart(part.kind, found.pop().outputs + part.outputs)
        found.append(part)
    return tuple(found)


def stored_size(part: BlockPart, inputs: int) -> int:
    """Bytes of a part that is not packed."""
    kind = BY_NAME[part.kind]
    return part.outputs * (inputs // kind.numbers) * kind.num_bytes


def packed_size(part: BlockPart, inputs: int) -> int:
    """Bytes of a part when it is packed."""
    return part.outputs // PANEL * (inputs // BY_NAME[part.kind].numbers) * PACKED_BYTES[part.kind]


def can_pack(part: BlockPart, inputs: int) -> bool:
    """Whether kernels take such a part."""
    return part.kind in BLOCK_TYPES and part.outputs % PANEL == 0 and inputs % BY_NAME[part.kind].numbers == 0


def expand_rows(data: Tensor, part: BlockPart, inputs: int) -> Tensor:
    """The bytes of a part that is not packed -> what it stands for, [outputs, inputs] float32."""
    return expand(part.kind, data.view(-1, BY_NAME[part.kind].num_bytes)).view(-1, inputs)


class QuantizedRows(NamedTuple):
    """Rows of activations in 8 bits."""

    values: Tensor
    """int8 [T, blocks of a row, inputs of a block], -127 to 127"""
    scales: Tensor
    """float32 [T, blocks of a row]"""


def quantize_rows(x: Tensor, kind: str) -> QuantizedRows:
    """x [T, I] in 8 bits, for a product with blocks of type `kind`, as llama.cpp quantizes activations.

    For blocks of 32 or 128 numbers, in blocks of 32 whose scale, the largest magnitude over 127, is rounded to 11 bits
    afterwards (as in float16, with the range of float32); for blocks of 256, in blocks of 256 and with the inverse of
    the inverse scale. Computed in float32, to the nearest, ties to even. A block with an infinity or a NaN has scale
    NaN and values 0.
    """
    shared = PANEL if kind in GROUPS else BY_NAME[kind].numbers
    blocks = x.to(torch.float32).view(len(x), x.shape[1] // shared, shared)
    largest = blocks.abs().amax(-1)
    inverse = torch.full_like(largest, LARGEST) / largest  # `127 / largest` would be a product with a reciprocal
    if shared == PANEL:
        bits = (largest / torch.full_like(largest, LARGEST)).view(torch.int32)
        scales = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
    else:
        scales = 1 / inverse
    some = largest.isfinite() & (largest >= LEAST_MAGNITUDE)
    values = torch.where(some[..., None], blocks * inverse[..., None], 0).round().to(torch.int8)
    scales = torch.where(some, scales, torch.where(largest.isfinite(), 0, torch.nan))
    return QuantizedRows(values, scales)


def block_product(x: Tensor, weight: BlockWeight) -> Tensor:
    """x [T, I] in 8 bits times a weight that is not packed, [T, O] float64: no product and no sum is rounded much."""
    outs = []
    for part, data in zip(weight.parts, weight.data_of_parts(), strict=True):
        values, scales = quantize_rows(x, part.kind)
        rows = (values.double() * scales.double()[..., None]).flatten(1)
        outs.append(rows @ expand_rows(data, part, weight.inputs).double().T)
    return torch.cat(outs, 1)


def take_block_rows(weight: BlockWeight, indices: Tensor) -> Tensor:
    """Rows `indices` [T] of a weight that is not packed, [T, I] float32."""
    out = torch.empty(len(indices), weight.inputs)
    if bool(((indices < 0) | (indices >= weight.outputs)).any()):
        raise IndexError(f"a row beyond the {weight.outputs} of the weight")
    first = 0
    for part, data in zip(weight.parts, weight.data_of_parts(), strict=True):
        here = ((indices >= first) & (indices < first + part.outputs)).nonzero()[:, 0]
        if len(here):
            rows = data.view(part.outputs, -1).index_select(0, indices[here] - first)
            out[here] = expand_rows(rows.flatten(), part, weight.inputs)
        first += part.outputs
    return out


def fields_of(weight: BlockWeight) -> list[tuple[Any, ...]]:
    """(address, outputs, type) of each part."""
    return [
        (data.data_ptr(), part.outputs, BLOCK_TYPES[part.kind])
        for part, data in zip(weight.parts, weight.data_of_parts(), strict=True)
    ]
