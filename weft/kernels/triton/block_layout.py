"""Weights in quantized blocks as the kernels in Triton read them: each plane of a part's bytes for itself, by panels of
32 outputs.

The numbers of a *step*, consecutive inputs of a panel, are in two halves of as many inputs: what a byte holds of 4 bits
each are an input of the first half and the one in its place in the second. Bits above four are in a plane of their own,
those of both inputs side by side. Scales are never rounded: a scale of a K-quant stays a float16 and a small integer.
A part takes as many bytes as when it is packed for a CPU (`PACKED_BYTES`).

Owns the layouts, and packing. Products: `weft.kernels.triton.blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from weft.gguf.types import BY_NAME
from weft.kernels.block_weights import PANEL, BlockPart, BlockWeight
from weft.kernels.quantized_blocks import SCALES, stored_factors, stored_numbers

PACKED_NUMBERS = 1 << 24
"""Numbers of a weight that are packed at a time, about: each is a few bytes meanwhile."""


class Layout(NamedTuple):
    """What a type of blocks has. A number q stands for (q - offset) * scale - minimum."""

    bits: int
    """Of a number: 4, 5, 6 or 8."""
    offset: int
    group: int
    """Inputs with the same scale, and the same minimum."""
    factors: bool = False
    """The scale of a group is one of the block times a small integer."""
    minima: bool = False
    """There are minima, scaled as the scales are."""
    zeros: bool = False
    """The offset is a zero point, one of each block."""

    @property
    def upper_bits(self) -> int:
        """Bits of a number above four that lie apart."""
        return 0 if self.bits == 8 else self.bits - 4


LAYOUTS: Mapping[str, Layout] = {
    "Q8_0": Layout(8, 0, 32),
    "Q4_0": Layout(4, 8, 32),
    "Q4_K": Layout(4, 0, 32, factors=True, minima=True),
    "Q5_K": Layout(5, 0, 32, factors=True, minima=True),
    "Q6_K": Layout(6, 32, 16, factors=True),
    "INT4_G32": Layout(4, 0, 32, zeros=True),
    "INT4_G128": Layout(4, 0, 128, zeros=True),
}


class Planes(NamedTuple):
    """Consecutive outputs of a weight whose blocks are of one type; the planes are views of its bytes."""

    layout: Layout
    outputs: int
    inputs: int
    half: int
    """Inputs of half a step."""
    block: int
    """Inputs of a block."""
    numbers: Tensor
    """[panels, steps, half (2 half for 8 bits), 32]: uint8, or int8 for 8 bits"""
    upper: Tensor
    """uint8 [panels, steps, rows, 32], where rows = half * (bits - 4) / 4: row i has the numbers at i, i + rows, ... of
    both halves, the lowest bits first; empty for 4 and 8 bits"""
    scales: Tensor
    """[panels, blocks, 32]: float16, or float32 with zero points"""
    minima: Tensor
    """[panels, blocks, 32]: float16 scales of minima, or uint8 zero points; else empty"""
    factors: Tensor
    """[panels, inputs / group, 32]: uint8, or int8 without minima; else empty"""
    minimum_factors: Tensor
    """uint8 as `factors`, or empty"""

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """All planes, in the order of a part's bytes."""
        return self.numbers, self.upper, self.scales, self.minima, self.factors, self.minimum_factors

    def of(self, first: int, end: int) -> Planes:
        """Those of panels `first` to `end`."""
        stored = [plane[first:end] for plane in self.stored]
        return Planes(self.layout, len(stored[0]) * PANEL, self.inputs, self.half, self.block, *stored)


class DeviceBlocks(BlockWeight):
    """A weight in quantized blocks, packed for the kernels in Triton."""

    planes: tuple[Planes, ...]
    """Of each part."""


def pack(weight: BlockWeight) -> DeviceBlocks:
    """A weight that is not packed -> the same one, in new memory on the same device."""
    sizes = [_sizes(part, weight.inputs) for part in weight.parts]
    data = weight.new_empty(sum(map(sum, sizes)), dtype=torch.uint8)
    packed = DeviceBlocks.of(data, weight.parts, weight.inputs, packed=True)
    found = []
    for part, stored, room in zip(weight.parts, weight.data_of_parts(), packed.data_of_parts(), strict=True):
        planes = _planes(part, weight.inputs, room)
        found.append(planes)
        panels = part.outputs // PANEL
        blocks = stored.view(panels, -1, BY_NAME[part.kind].num_bytes)
        most = max(1, PACKED_NUMBERS // (PANEL * weight.inputs))
        for first in range(0, panels, most):
            _fill(planes.of(first, first + most), blocks[first : first + most].flatten(0, 1), part.kind)
    packed.planes = tuple(found)
    return packed


def take_rows(weight: DeviceBlocks, indices: Tensor) -> Tensor:
    """Rows `indices` [T] of a packed weight, [T, I] float32. Waits for nothing, so it can be captured."""
    first, rows = 0, None
    for planes in weight.planes:
        here = _rows(planes, (indices - first).clamp(0, planes.outputs - 1).long())
        rows = here if rows is None else torch.where((indices >= first)[:, None], here, rows)
        first += planes.outputs
    assert rows is not None, "a weight has a part"
    return rows


def _half(kind: str, inputs: int) -> int:
    """Inputs of half a step: they share a scale, and are as many as there can be."""
    return 32 if LAYOUTS[kind].group >= 32 and inputs % 64 == 0 else 16


def _sizes(part: BlockPart, inputs: int) -> list[int]:
    """Bytes of each plane, in order."""
    layout, block = LAYOUTS[part.kind], BY_NAME[part.kind].numbers
    blocks, groups = part.outputs * inputs // block, part.outputs * inputs // layout.group
    return [
        part.outputs * inputs * (8 if layout.bits == 8 else 4) // 8,
        part.outputs * inputs * layout.upper_bits // 8,
        blocks * (4 if layout.zeros else 2),
        blocks * (1 if layout.zeros else 2 if layout.minima else 0),
        groups if layout.factors else 0,
        groups if layout.factors and layout.minima else 0,
    ]


def _planes(part: BlockPart, inputs: int, data: Tensor) -> Planes:
    layout, block, half = LAYOUTS[part.kind], BY_NAME[part.kind].numbers, _half(part.kind, inputs)
    panels, steps = part.outputs // PANEL, inputs // (2 * half)
    numbers, upper, scales, minima, factors, minimum_factors = torch.split(data, _sizes(part, inputs))
    if layout.bits == 8:
        numbers = numbers.view(torch.int8)
    return Planes(
        layout,
        part.outputs,
        inputs,
        half,
        block,
        numbers.view(panels, steps, -1, PANEL),
        upper.view(panels, steps, -1, PANEL) if len(upper) else upper,
        scales.view(torch.float32 if layout.zeros else torch.float16).view(panels, -1, PANEL),
        (minima if layout.zeros else minima.view(torch.float16)).view(panels, -1, PANEL) if len(minima) else minima,
        factors.view(torch.uint8 if layout.minima else torch.int8).view(panels, -1, PANEL) if len(factors) else factors,
        minimum_factors.view(panels, -1, PANEL) if len(minimum_factors) else minimum_factors,
    )


def _fill(planes: Planes, blocks: Tensor, kind: str) -> None:
    """blocks [n, bytes of a block] as they are stored, row by row."""
    layout, half = planes.layout, planes.half
    panels, steps = planes.numbers.shape[:2]

    def by_panel(stored: Tensor) -> Tensor:
        """Of all rows one after the other -> [panels, n of a row, 32]."""
        return stored.reshape(panels, PANEL, -1).transpose(1, 2)

    numbers = by_panel(stored_numbers(kind, blocks))
    if layout.bits == 8:
        planes.numbers.copy_(numbers.reshape(planes.numbers.shape).view(torch.int8))
    else:
        first, second = numbers.reshape(panels, steps, 2, half, PANEL).unbind(2)
        planes.numbers.copy_(first & 15 | (second & 15) << 4)
    width = layout.upper_bits
    if width:
        pairs = torch.split(first >> 4 | second >> 4 << width, planes.upper.shape[2], 2)
        planes.upper.copy_(torch.stack([pair << 2 * width * place for place, pair in enumerate(pairs)]).sum(0))
    if layout.zeros:
        planes.scales.copy_(by_panel(blocks[:, :4].contiguous().view(torch.float32)))
        planes.minima.copy_(by_panel(blocks[:, 4]))
        return
    first_scale, num_scales = SCALES[kind]
    halves = blocks[:, first_scale : first_scale + 2 * num_scales].contiguous().view(torch.float16)
    planes.scales.copy_(by_panel(halves[:, 0]))
    if layout.minima:
        planes.minima.copy_(by_panel(halves[:, 1]))
        for plane, factors in zip((planes.factors, planes.minimum_factors), stored_factors(blocks), strict=True):
            plane.copy_(by_panel(factors))
    elif layout.factors:
        planes.factors.copy_(by_panel(blocks[:, 192:208].view(torch.int8)))


def _rows(planes: Planes, indices: Tensor) -> Tensor:
    """[T, I] float32"""
    layout, half = planes.layout, planes.half
    panels, outputs = indices // PANEL, indices % PANEL

    def taken(plane: Tensor, repeats: int) -> Tensor:
        """A plane with `repeats` inputs to a row, [T, I] float32."""
        return plane[panels, :, outputs].float().repeat_interleave(repeats, 1)

    numbers = planes.numbers[panels, ..., outputs]
    if layout.bits != 8:
        numbers = torch.stack([numbers & 15, numbers >> 4], 2)
        width = layout.upper_bits
        if width:
            upper = planes.upper[panels, ..., outputs]
            places = [upper >> 2 * width * place for place in range(half // upper.shape[-1])]
            pairs = torch.cat(places, -1)
            mask = (1 << width) - 1
            numbers = numbers | torch.stack([pairs & mask, pairs >> width & mask], 2) << 4
    values = numbers.flatten(1).float() - layout.offset
    scales = taken(planes.scales, planes.block)
    if layout.factors:
        scales = scales * taken(planes.factors, layout.group)
    if layout.zeros:
        return (values - taken(planes.minima, planes.block)) * scales
    if not layout.minima:
        return values * scales
    return values * scales - taken(planes.minima, planes.block) * taken(planes.minimum_factors, layout.group)
