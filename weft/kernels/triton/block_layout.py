"""Weights in quantized blocks as the kernels in Triton read them: each plane of a part's bytes for itself, by panels of
32 outputs.

The numbers of a *step*, 32 inputs of a panel, are in 128 *places*: number 16 a + 4 b + c is for output 4 a + c and the
eight inputs from 8 b on. A place has their lowest four bits in a word, the first input lowest, and the bits above four
in a plane of their own; of 8 bits it has a word in each half of the step, for four inputs each. `device.blocks` says
why. Scales are never rounded: a scale of a K-quant stays a float16 and a small integer. A part takes as many bytes as
when it is packed for a CPU (`PACKED_BYTES`).

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
STEP = 32
"""Inputs."""
UPPER_BITS = {5: tuple(4 * (i % 2) + i // 2 for i in range(8)), 6: (0, 4, 2, 6, 8, 12, 10, 14)}
"""Where the upper bits of each of the eight numbers of a place begin: those of two neighbours are four apart, as their
lower bits are, so that one shift moves both."""


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
    "Q8_0": Layout(8, 128, 32),
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
    block: int
    """Inputs of a block."""
    numbers: Tensor
    """int32 [panels, steps, 1 (2 for 8 bits), 8, 4, 4]"""
    upper: Tensor
    """[panels, steps, 8, 4, 4]: uint8 for 5 bits, int16 for 6, as `UPPER_BITS` says; else empty"""
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
        return Planes(self.layout, len(stored[0]) * PANEL, self.inputs, self.block, *stored)


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
    layout, block = LAYOUTS[part.kind], BY_NAME[part.kind].numbers
    panels, steps = part.outputs // PANEL, inputs // STEP
    numbers, upper, scales, minima, factors, minimum_factors = torch.split(data, _sizes(part, inputs))
    if layout.bits == 6:
        upper = upper.view(torch.int16)
    return Planes(
        layout,
        part.outputs,
        inputs,
        block,
        numbers.view(torch.int32).view(panels, steps, -1, 8, 4, 4),
        upper.view(panels, steps, 8, 4, 4) if len(upper) else upper,
        scales.view(torch.float32 if layout.zeros else torch.float16).view(panels, -1, PANEL),
        (minima if layout.zeros else minima.view(torch.float16)).view(panels, -1, PANEL) if len(minima) else minima,
        factors.view(torch.uint8 if layout.minima else torch.int8).view(panels, -1, PANEL) if len(factors) else factors,
        minimum_factors.view(panels, -1, PANEL) if len(minimum_factors) else minimum_factors,
    )


def _fill(planes: Planes, blocks: Tensor, kind: str) -> None:
    """blocks [n, bytes of a block] as they are stored, row by row."""
    layout, panels = planes.layout, len(planes.numbers)

    def by_panel(stored: Tensor) -> Tensor:
        """Of all rows one after the other -> [panels, n of a row, 32]."""
        return stored.reshape(panels, PANEL, -1).transpose(1, 2)

    numbers = stored_numbers(kind, blocks).reshape(panels, 8, 4, -1, 4, 8).permute(0, 3, 1, 4, 2, 5)
    if layout.bits == 8:
        # Bytes of a word begin with the lowest; a number is stored less 128.
        halves = (numbers ^ 128).reshape(*numbers.shape[:-1], 2, 4).movedim(-2, 2)
        planes.numbers.copy_(halves.contiguous().view(torch.int32).squeeze(-1))
    else:
        lower = numbers & 15
        packed = lower[..., ::2] | lower[..., 1::2] << 4
        planes.numbers.copy_(packed.contiguous().view(torch.int32).squeeze(-1)[:, :, None])
    if layout.upper_bits:
        places = torch.tensor(UPPER_BITS[layout.bits], device=numbers.device)
        planes.upper.copy_((numbers.int() >> 4 << places).sum(-1))
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
    layout = planes.layout
    panels, outputs = indices // PANEL, indices % PANEL

    def taken(plane: Tensor, repeats: int) -> Tensor:
        """A plane with `repeats` inputs to a row, [T, I] float32."""
        return plane[panels, :, outputs].float().repeat_interleave(repeats, 1)

    def of_places(plane: Tensor, shifts: Tensor, bits: int) -> Tensor:
        """[panels, steps, n, 8, 4, 4] -> a number from each of `shifts` bits on, [T, I]."""
        words = plane[panels, :, :, outputs // 4, :, outputs % 4].movedim(-1, 2)
        return (words[..., None].int() >> shifts & ((1 << bits) - 1)).flatten(1)

    shifts = torch.arange(0, 32, 8 if layout.bits == 8 else 4, device=indices.device)
    numbers = of_places(planes.numbers, shifts, 8 if layout.bits == 8 else 4)
    if layout.upper_bits:
        shifts = torch.tensor(UPPER_BITS[layout.bits], device=indices.device)
        numbers = numbers | of_places(planes.upper[:, :, None], shifts, layout.upper_bits) << 4
    values = numbers.float() - layout.offset
    scales = taken(planes.scales, planes.block)
    if layout.factors:
        scales = scales * taken(planes.factors, layout.group)
    if layout.zeros:
        return (values - taken(planes.minima, planes.block)) * scales
    if not layout.minima:
        return values * scales
    return values * scales - taken(planes.minima, planes.block) * taken(planes.minimum_factors, layout.group)
