"""Products with weights in quantized blocks in Triton.

For up to `FUSED_ROWS` rows a weight is read as it is. For more, floats are made of some of its outputs at a time, and
the product is torch's. Neither rounds activations; both round what a number stands for to the dtype of activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.kernels import torch_ops
from weft.kernels.block_weights import PANEL
from weft.kernels.triton.block_layout import STEP, DeviceBlocks, Planes
from weft.kernels.triton.device import blocks as device
from weft.kernels.triton.launch import INTERPRETED

FUSED_ROWS = 64
"""On an H100, 128 rows of INT4_G128 take two tiles: 82 microseconds with 4,096 inputs and 12,288 outputs, about 120
with 12,288 and 4,096. Making floats takes 50, and torch's product of them 50."""
EXPANDED_NUMBERS = 1 << 25
"""Numbers of a weight that are floats at a time, about."""
EXPANDED_STEPS = 4
"""Of one program: 50 microseconds for 4,096 x 12,288 numbers of 4 bits to bfloat16 on an H100, 52.5 with 1 or 2."""
EXPONENT = 0x4B000000
"""Bits of 2^23 in float32."""
LONG_INPUTS = 8192


class ProductTile(NamedTuple):
    """What a program of `device.block_linear` has: rows, warps, steps of each warp at a time, and stages of loads."""

    rows: int
    warps: int
    steps: int
    stages: int


EXACT_TILE = ProductTile(16, 4, 1, 1)
"""For float32, whose products are not of tensor cores. Not tuned by measurement."""
TILES = {
    False: (ProductTile(8, 8, 4, 1), ProductTile(16, 4, 2, 1), ProductTile(32, 4, 2, 1), ProductTile(64, 4, 1, 1)),
    True: (ProductTile(8, 16, 2, 1), ProductTile(16, 16, 2, 1), ProductTile(32, 8, 2, 1), ProductTile(64, 4, 2, 3)),
}
"""By whether inputs are `LONG_INPUTS` or more. The fastest for INT4_G128 of those measured on an H100 with bfloat16 x
and a weight that is not in its L2 cache, and that need at most 99 KiB of shared memory, the least that a block can have
on devices from capability 8.0. Microseconds for 8, 16, 32 and 64 rows:

4,096 inputs, 12,288 outputs: INT4_G128 22, 27, 31, 46; Q4_K 24, 29, 33, 48; torch's product of floats 48 to 51.
12,288 inputs, 4,096 outputs: INT4_G128 27, 34, 42, 61; Q4_K 29, 36, 44; torch's 50 to 52.

The kernel was simplified after that. On an H200 it takes 23 for 8 rows of Q4_K with 4,096 inputs (torch 37), 83 for 64
(37).

Two panels for a program, or ranges of inputs for several programs whose sums another kernel adds, gained 13 % at
most."""


def linear(x: Tensor, weight: DeviceBlocks, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] to [T, O]; tensors have one dtype that the kernels know. `residual` is consumed."""
    x = x.contiguous()
    if len(x) > FUSED_ROWS:
        return _expanded_linear(x, weight, bias, residual)
    out = x.new_empty(len(x), weight.outputs) if residual is None else residual.contiguous()
    first = 0
    for planes in weight.planes if len(x) else ():
        _fused_linear(x, planes, None if bias is None else bias[first:], residual is not None, out[:, first:])
        first += planes.outputs
    return out


def _fused_linear(x: Tensor, planes: Planes, bias: Tensor | None, is_added: bool, out: Tensor) -> None:
    """out [T, outputs of the part and those beyond], which the product is added to if asked."""
    tiles = TILES[planes.inputs >= LONG_INPUTS]
    tile = EXACT_TILE if x.dtype == torch.float32 else next(tile for tile in tiles if tile.rows >= len(x))
    device.block_linear[planes.outputs // PANEL, triton.cdiv(len(x), tile.rows)](
        *(x, *_tensors(planes), x if bias is None else bias, out, out, len(x), out.stride(0), EXPONENT),
        **_sizes(planes),
        BIASED=bias is not None,
        ADDED=is_added,
        WIDEN=INTERPRETED,
        # The compiler goes by the narrowest numbers that the operands are made of.
        WIDTH=8 if any(plane.element_size() == 1 and plane.numel() for plane in planes.stored) else 4,
        W=tile.warps,
        U=tile.steps,
        M=tile.rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _expanded_linear(x: Tensor, weight: DeviceBlocks, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    most = max(1, EXPANDED_NUMBERS // (weight.inputs * PANEL)) * PANEL
    if weight.outputs <= most:
        return torch_ops.linear(x, expanded(weight, 0, weight.outputs, x.dtype), bias, residual)
    out = x.new_empty(len(x), weight.outputs)
    for first in range(0, weight.outputs, most):
        outputs = slice(first, min(first + most, weight.outputs))
        floats = expanded(weight, outputs.start, outputs.stop, x.dtype)
        out[:, outputs] = torch_ops.linear(x, floats, None if bias is None else bias[outputs])
    return out if residual is None else residual.add_(out)


def expanded(weight: DeviceBlocks, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Outputs `first` to `end`, multiples of 32, of a weight, [end - first, I], each value rounded once."""
    out = torch.empty(end - first, weight.inputs, dtype=dtype, device=weight.device)
    begin = 0
    for planes in weight.planes:
        here = slice(max(first - begin, 0), min(end - begin, planes.outputs))
        if here.start < here.stop:
            device.expand_blocks[(here.stop - here.start) // PANEL, triton.cdiv(weight.inputs, STEP * EXPANDED_STEPS)](
                *(*_tensors(planes), out[begin + here.start - first :], here.start // PANEL, EXPONENT),
                **_sizes(planes),
                U=EXPANDED_STEPS,
            )
        begin += planes.outputs
    return out


def _tensors(planes: Planes) -> Iterator[Tensor]:
    """The planes, and some other one for each that the type does not have."""
    for plane in planes.stored:
        yield plane if plane.numel() else planes.numbers


def _sizes(planes: Planes) -> dict[str, Any]:
    layout = planes.layout
    return {
        "INPUTS": planes.inputs,
        "BITS": layout.bits,
        "OFFSET": layout.offset,
        "BLOCK": planes.block,
        "GROUP": layout.group,
        "FACTORS": layout.factors,
        "MINIMA": layout.minima,
        "ZEROS": layout.zeros,
    }
