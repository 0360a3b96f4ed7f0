"""How a weight becomes 8 or 4 bits: quantized blocks as GGUF files have them, for the same kernels.

int8 is Q8_0: groups of 32 inputs with a scale, 8.5 bits a weight. int4 is Q4_K for rows of whole blocks of 256 inputs:
groups of 32 with a scale and a minimum of 6 bits each, about 4.6 bits; other rows become Q4_0: groups of 32 with a
scale, 4.5 bits. `bench.quantization` measures the loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.config import Quantization

GROUP, GROUPS = 32, 8
"""Numbers of a group, and groups of a block of Q4_K."""
TINY = torch.finfo(torch.float32).tiny
"""The inverse of a smaller number may overflow."""
LARGEST_BYTE, LARGEST, LARGEST_SCALE = 127, 15, 63
"""Of a number of Q8_0 (in both directions), and of one in 4 bits and of a scale of Q4_K."""
KINDS: Mapping[Quantization, frozenset[str]] = {"int8": frozenset({"Q8_0"}), "int4": frozenset({"Q4_K", "Q4_0"})}
"""Types of blocks that a model has with a quantization."""


def block_kind(quantization: Quantization, inputs: int) -> str:
    """The type of blocks for rows of so many inputs."""
    if quantization == "int8":
        return "Q8_0"
    return "Q4_K" if inputs % (GROUP * GROUPS) == 0 else "Q4_0"


def quantize(weight: Tensor, kind: str) -> Tensor:
    """weight [O, I], floats -> its rows in blocks of a type that `block_kind` gives, uint8 [O, bytes of a row].

    Computed in float32, a row at a time as it were. Raises `ValueError` for a number that is not finite or whose scale
    float16 does not hold, and for rows that are not whole groups of 32.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"rows of {inputs} inputs are no whole groups of {GROUP}")
    if not bool(weight.isfinite().all()):
        raise ValueError("the weight has values that are not finite")
    values = weight.to(torch.float32)
    if kind == "Q4_K":
        blocks = _q4_k(values.view(-1, GROUPS, GROUP))
    else:
        blocks = (_q8_0 if kind == "Q8_0" else _q4_0)(values.view(-1, GROUP))
    return blocks.view(outputs, -1)


def _q8_0(groups: Tensor) -> Tensor:
    """groups [n, 32]: by the largest magnitude, to the nearest, ties away from zero, as ggml has it."""
    largest = groups.abs().amax(1, keepdim=True)
    steps = largest / torch.full_like(largest, LARGEST_BYTE)  # torch makes a product of a quotient by a number
    magnitudes = groups.abs() * torch.where(steps > 0, torch.ones_like(steps) / steps.clamp(min=TINY), 0)
    numbers = magnitudes.floor()
    numbers += (magnitudes - numbers >= 0.5).float()
    return torch.cat([_float16(steps), numbers.copysign_(groups).to(torch.int8).view(torch.uint8)], 1)


def _q4_0(groups: Tensor) -> Tensor:
    """groups [n, 32]: -8 stands for the number of the largest magnitude, as ggml has it."""
    at = groups.abs().argmax(1, keepdim=True)
    steps = groups.gather(1, at) / -8
    inverse = torch.where(steps != 0, torch.ones_like(steps) / steps, 0)
    numbers = (groups * inverse + 8.5).to(torch.uint8).clamp_(0, LARGEST)
    return torch.cat([_float16(steps), numbers[:, :16] | numbers[:, 16:] << 4], 1)


def _q4_k(blocks: Tensor) -> Tensor:
    """blocks [n, 8, 32]: each group by its smallest number, or 0, and its largest."""
    low, high = (-blocks.amin(2)).clamp(min=0), blocks.amax(2)
    scales, minima = (high + low) / LARGEST, low
    scale_of_scales, scale_of_minima = (
        (one.amax(1, keepdim=True) / LARGEST_SCALE).to(torch.float16) for one in (scales, minima)
    )
    scale_bits, minimum_bits = (
        torch.where(step > 0, one / step.float().clamp(min=1e-30), 0).round().clamp_(0, LARGEST_SCALE).to(torch.uint8)
        for one, step in ((scales, scale_of_scales), (minima, scale_of_minima))
    )
    steps = (scale_of_scales.float() * scale_bits)[..., None]
    offsets = (scale_of_minima.float() * minimum_bits)[..., None]
    numbers = torch.where(steps > 0, (blocks + offsets) / steps, 0).round().clamp_(0, LARGEST).to(torch.uint8)
    pairs = numbers.view(-1, GROUPS // 2, 2, GROUP)
    upper_scales, upper_minima = scale_bits[:, 4:], minimum_bits[:, 4:]
    parts = (
        _float16(scale_of_scales),
        _float16(scale_of_minima),
        scale_bits[:, :4] | upper_scales >> 4 << 6,
        minimum_bits[:, :4] | upper_minima >> 4 << 6,
        (upper_scales & 15) | (upper_minima & 15) << 4,
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1),
    )
    return torch.cat(parts, 1)


def _float16(scales: Tensor) -> Tensor:
    """scales [n, 1] as bytes [n, 2]."""
    halves = scales.to(torch.float16)
    if not bool(halves.isfinite().all()):
        raise ValueError("the weight has a scale beyond the range of float16")
    return halves.contiguous().view(torch.uint8)
