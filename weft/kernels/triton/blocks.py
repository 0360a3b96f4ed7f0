"""Products with weights in quantized blocks in Triton.

For up to `FUSED_ROWS` rows a weight is read as it is. For more, floats are made of some of its outputs at a time, and
the product is torch's. Neither rounds activations. Which rows take which way, and the sizes of the kernels, were not
tuned by measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from weft.kernels import torch_ops
from weft.kernels.block_weights import PANEL
from weft.kernels.triton.block_layout import DeviceBlocks, Planes
from weft.kernels.triton.device import blocks as device
from weft.kernels.triton.launch import INTERPRETED

FUSED_ROWS = 64
LEAST_ROWS = 16
"""The fewest rows that a program has: products of tiles need as many."""
EXPANDED_NUMBERS = 1 << 25
"""Numbers of a weight that are floats at a time, about."""


def linear(x: Tensor, weight: DeviceBlocks, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I] to [T, O]; tensors have one dtype that the kernels know. `residual` is consumed."""
    x = x.contiguous()
    if len(x) > FUSED_ROWS:
        return _expanded_linear(x, weight, bias, residual)
    out = x.new_empty(len(x), weight.outputs) if residual is None else residual.contiguous()
    rows = max(LEAST_ROWS, triton.next_power_of_2(len(x)))
    first = 0
    for planes in weight.planes if len(x) else ():
        beyond = out[:, first:]
        device.block_linear[planes.outputs // PANEL, triton.cdiv(len(x), rows)](
            *(x, *_tensors(planes), x if bias is None else bias[first:], beyond, beyond, len(x), weight.outputs),
            **_sizes(planes),
            BIASED=bias is not None,
            ADDED=residual is not None,
            WIDEN=INTERPRETED,
            BLOCK_M=rows,
        )
        first += planes.outputs
    return out


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
            steps = weight.inputs // (2 * planes.half)
            device.expand_blocks[(here.stop - here.start) // PANEL, steps](
                *(*_tensors(planes), out[begin + here.start - first :], here.start // PANEL), **_sizes(planes)
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
        "HALF": planes.half,
        "BLOCK": planes.block,
        "GROUP": layout.group,
        "FACTORS": layout.factors,
        "MINIMA": layout.minima,
        "ZEROS": layout.zeros,
    }
