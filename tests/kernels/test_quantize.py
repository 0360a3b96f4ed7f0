"""Weights that become 8 or 4 bits: the blocks, and how near they are."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch

from weft.config import Quantization
from weft.kernels.block_weights import BlockPart, expand_rows
from weft.kernels.quantize import block_kind, quantize


def expanded(blocks: torch.Tensor, kind: str, inputs: int) -> torch.Tensor:
    return expand_rows(blocks.flatten(), BlockPart(kind, len(blocks)), inputs)


def random_weight(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-2, 1, outputs)[torch.randperm(outputs, generator=generator), None]
    return torch.randn(outputs, inputs, generator=generator) * sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("quantization", "inputs", "kind", "least", "most"),
    [
        ("int8", 512, "Q8_0", 0.004, 0.008),
        ("int8", 96, "Q8_0", 0.003, 0.008),
        ("int4", 512, "Q4_K", 0.05, 0.085),
        ("int4", 96, "Q4_0", 0.05, 0.11),
    ],
)
def test_numbers_are_near(
    dtype: torch.dtype, quantization: Quantization, inputs: int, kind: str, least: float, most: float
) -> None:
    weight = random_weight(40, inputs).to(dtype)
    assert block_kind(quantization, inputs) == kind
    blocks = quantize(weight, kind)
    assert blocks.dtype == torch.uint8
    got = expanded(blocks, kind, inputs)
    errors = (got - weight.float()).square().mean(1).sqrt() / weight.float().std(1)
    assert errors.max() < most
    assert errors.min() > least


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    weight = random_weight(40, 96)
    weight[3, :32] = 0
    weight[4, :32] = torch.arange(32) * 0.5 - 0.5  # ties
    weight[4, 0] = 127
    weight[5, :32] *= 1e-6
    weight[6, :32] *= 1e-30
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(quantize(weight, kind).numpy(), expected)


def test_q4_k_stands_for_what_the_gguf_package_says() -> None:
    blocks = quantize(random_weight(16, 512), "Q4_K")
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(expanded(blocks, "Q4_K", 512).numpy(), expected)


def test_exact_numbers_stay_exact() -> None:
    """Groups whose scales and minima are multiples of those of the block."""
    numbers = torch.arange(256).view(8, 32) % 16
    scales = torch.tensor([63, 21, 9, 7, 3, 1, 63, 33.0])[:, None]
    minima = torch.tensor([63, 42, 0, 1, 32, 15, 16, 48.0])[:, None]
    weight = (numbers * scales - minima).view(1, 256) / 64
    assert torch.equal(expanded(quantize(weight, "Q4_K"), "Q4_K", 256), weight)
    for constant in (0.0, 1.5, -1.5):
        got = expanded(quantize(torch.full((2, 256), constant), "Q4_K"), "Q4_K", 256)
        assert ((got - constant).abs() <= 0.001).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_has_no_scale_is_refused(kind: str, value: float) -> None:
    weight = torch.ones(3, 256)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, kind)
    weight[1, 2] = 3e38
    with pytest.raises(ValueError, match="beyond the range of float16"):
        quantize(weight, kind)
    with pytest.raises(ValueError, match="33 inputs"):
        quantize(torch.ones(2, 33), kind)
