"""How a weight becomes int8 and what an int8 weight stands for: symmetric, one scale for each output.

A scale for each output, rather than for each group of 64 or 128 inputs, leaves the product's inner loop without any: a
sum over all inputs is scaled once. Integers up to 127 are exact in bfloat16, so nothing but the quantization itself is
rounded. `bench.quantization` measures what it costs in accuracy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
"""Of an int8 weight, in both directions: -128 has no opposite and is not used."""


class Quantized(NamedTuple):
    """An int8 weight and its scales."""

    values: Tensor
    """int8 [O, I]"""
    scales: Tensor
    """float32 [O]: output o of the weight is `values[o] * scales[o]`."""


def quantize(weight: Tensor) -> Quantized:
    """weight [O, I], floats, in int8: each row by its largest magnitude, to the nearest, ties to even.

    Computed in float32, or float64 for float64. A row of zeros has scale 0. Raises `ValueError` for a row with an
    infinity or a NaN, for which there is no scale.
    """
    widened = weight.to(torch.promote_types(weight.dtype, torch.float32))
    largest = widened.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise ValueError("the weight has values that are not finite")
    scales = (largest / LARGEST).to(torch.float32)
    steps = torch.where(scales > 0, scales, 1).to(widened.dtype)
    values = (widened / steps[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return Quantized(values, scales)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] that int8 `values` [O, I] and `scales` [O] stand for, rounded once to `dtype`."""
    accumulate = torch.promote_types(dtype, torch.float32)
    return values.to(accumulate).mul_(scales[:, None]).to(dtype)
