"""Weights that become 4 bits: the blocks, and how near they are."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch

from weft.kernels.block_weights import BlockPart, expand_rows
from weft.kernels.quantize_int4 import int4_kind, quantize_int4


def expanded(blocks: torch.Tensor, inputs: int) -> torch.Tensor:
    return expand_rows(blocks.flatten(), BlockPart(int4_kind(inputs), len(blocks)), inputs)


def random_weight(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-2, 1, outputs)[torch.randperm(outputs, generator=generator), None]
    return torch.randn(outputs, inputs, generator=generator) * sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "kind", "bound"), [(512, "Q4_K", 0.085), (96, "Q4_0", 0.11)])
def test_numbers_are_near(dtype: torch.dtype, inputs: int, kind: str, bound: float) -> None:
    weight = random_weight(40, inputs).to(dtype)
    assert int4_kind(inputs) == kind
    blocks = quantize_int4(weight)
    assert blocks.dtype == torch.uint8
    got = expanded(blocks, inputs)
    errors = (got - weight.float()).square().mean(1).sqrt() / weight.float().std(1)
    assert errors.max() < bound
    assert errors.min() > 0.05


def test_q4_0_is_that_of_the_gguf_package() -> None:
    weight = random_weight(40, 96)
    weight[3, :32] = 0
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(quantize_int4(weight).numpy(), expected)


def test_q4_k_stands_for_what_the_gguf_package_says() -> None:
    blocks = quantize_int4(random_weight(16, 512))
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(expanded(blocks, 512).numpy(), expected)


def test_exact_numbers_stay_exact() -> None:
    """Groups whose scales and minima are multiples of those of the block."""
    numbers = torch.arange(256).view(8, 32) % 16
    scales = torch.tensor([63, 21, 9, 7, 3, 1, 63, 33.0])[:, None]
    minima = torch.tensor([63, 42, 0, 1, 32, 15, 16, 48.0])[:, None]
    weight = (numbers * scales - minima).view(1, 256) / 64
    assert torch.equal(expanded(quantize_int4(weight), 256), weight)
    for constant in (0.0, 1.5, -1.5):
        got = expanded(quantize_int4(torch.full((2, 256), constant)), 256)
        assert ((got - constant).abs() <= 0.001).all()


@pytest.mark.parametrize("inputs", [256, 32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_has_no_scale_is_refused(inputs: int, value: float) -> None:
    weight = torch.ones(3, inputs)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_int4(weight)
    weight[1, 2] = 3e38
    with pytest.raises(ValueError, match="beyond the range of float16"):
        quantize_int4(weight)
    with pytest.raises(ValueError, match="33 inputs"):
        quantize_int4(torch.ones(2, 33))
