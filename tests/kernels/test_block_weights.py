"""Products with quantized blocks: activations in 8 bits, and every level against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.kernels.blocks import SCALES, TILE_ROWS, all_kernels, name_of, random_block_weight, rounds_activations
from weft.gguf.types import BY_NAME, GROUPS
from weft.kernels import reference, torch_ops
from weft.kernels.block_weights import BLOCK_TYPES, BlockPart, BlockWeight, expand_rows, packed_size, quantize_rows
from weft.kernels.cpu import library

DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Largest difference from the reference, relative to the largest value of it: sums of floats are in another order."""
KERNELS = all_kernels()
levels = pytest.mark.parametrize("kernels", KERNELS, ids=[name_of(kernels) for kernels in KERNELS])
kinds = pytest.mark.parametrize("kind", BLOCK_TYPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small products, and many of them; one test compares numbers of threads
    yield
    torch.set_num_threads(before)


def assert_close(got, expected, bound):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    largest = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert ((got.double() - expected.double()).abs() <= bound * largest).all()


def matrix_of(weight: BlockWeight) -> torch.Tensor:
    """What the weight stands for, [O, I] float32."""
    parts = zip(weight.parts, weight.data_of_parts(), strict=True)
    return torch.cat([expand_rows(data, part, weight.inputs) for part, data in parts])


def product_of(kernels, x, weight, bias=None, residual=None):
    """What the kernels are to compute."""
    if rounds_activations(kernels, len(x), x.dtype):
        return reference.linear(x, weight, bias, residual)
    y = x.double() @ matrix_of(weight).bfloat16().double().T
    for term in (bias, residual):
        y += term if term is not None else 0
    return y.to(x.dtype)


# Activations in 8 bits


def test_activations_by_hand():
    x = torch.zeros(1, 64)
    x[0, :6] = torch.tensor([127.0, -126.5, 125.5, 0.5, 1.5, -63.4])
    x[0, 32:] = torch.arange(-16, 16) * 0.25
    values, scales = quantize_rows(x, "Q8_0")
    assert values[0, 0, :6].tolist() == [127, -126, 126, 0, 2, -63]
    assert not values[0, 0, 6:].any()
    assert scales[0, 0] == 1
    assert values[0, 1].tolist() == [round(127 * i / 16) for i in range(-16, 16)]
    assert scales[0, 1] == np.float32(np.float16(4 / 127))
    values, scales = quantize_rows(torch.cat([x, -x, x, x], 1), "Q4_K")
    assert (values.shape, scales.tolist()) == ((1, 1, 256), [[1.0]])
    assert values[0, 0, :6].tolist() == [127, -126, 126, 0, 2, -63]
    assert values[0, 0, 64:70].tolist() == [-127, 126, -126, 0, -2, 63]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_activations_are_within_half_a_step(dtype, kind):
    sizes = torch.logspace(-4, 3, 40)[:, None]
    x = (torch.randn(40, 512, generator=torch.Generator().manual_seed(1)) * sizes).to(dtype)
    values, scales = quantize_rows(x, kind)
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert (values.int().abs().amax(-1) == 127).all()
    errors = ((values * scales[..., None]).flatten(1) - x.float()).abs().view(values.shape)
    assert (errors <= scales[..., None] * (0.5 + 127 * 2.0**-11)).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_activations_without_a_scale(kind):
    x = torch.ones(5, 256)
    x[0] = 0
    x[1] = 1e-38
    x[2, 7], x[3, 7], x[4, 7] = math.inf, -math.inf, math.nan
    values, scales = quantize_rows(x, kind)
    assert not values[:2].any()
    assert (scales[:2] == 0).all()
    assert scales[2:, 0].isnan().all()
    assert not values[2:, 0].any()
    # A scale beyond the range of float16.
    assert quantize_rows(torch.full((1, 256), 3e38), kind).scales.isfinite().all()


# The reference


@kinds
def test_the_reference_is_the_product_with_rounded_activations(kind):
    weight = random_block_weight([(kind, 40)], 512)
    x, bias, residual = torch.randn(3, 512).double(), torch.randn(40).double(), torch.randn(3, 40).double()
    values, scales = quantize_rows(x, kind)
    rounded = (values.double() * scales.double()[..., None]).flatten(1)
    expected = rounded @ matrix_of(weight).double().T
    torch.testing.assert_close(reference.linear(x, weight, bias, residual), expected + bias + residual)
    assert (reference.linear(x, weight) - x @ matrix_of(weight).double().T).abs().max() > 1e-4
    plain = torch_ops.linear(x.float(), weight, bias.float(), residual.float())
    torch.testing.assert_close(plain, (expected + bias + residual).float())
    taken = reference.take_rows(weight, torch.tensor([3, 39, 0]), torch.bfloat16)
    assert torch.equal(taken, matrix_of(weight)[[3, 39, 0]].bfloat16())


def test_a_weight_knows_its_bytes():
    weight = random_block_weight([("Q4_K", 32), ("Q4_K", 64), ("Q6_K", 32)], 512)
    assert weight.parts == (BlockPart("Q4_K", 96), BlockPart("Q6_K", 32))
    assert (weight.outputs, weight.inputs, weight.packed) == (128, 512, False)
    assert not isinstance(weight[:5], BlockWeight)
    with pytest.raises(ValueError, match="Q4_K"):
        BlockWeight.of(weight[1:], weight.parts, 512)
    with pytest.raises(IndexError, match="128"):
        reference.take_rows(weight, torch.tensor([128]))


# The kernels in C++


@levels
@kinds
@dtypes
def test_product_with_packed_blocks(kernels, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((96, 256), (64, 1280)):
        weight = random_block_weight([(kind, outputs)], inputs)
        packed = kernels.pack_weight(weight)
        assert packed.packed
        assert packed.numel() == packed_size(weight.parts[0], inputs)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        for rows in (0, 1, 2, 3, 5, 6, 7, 13, 40):
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            residual = torch.randn(rows, outputs, generator=generator).to(dtype)
            expected = product_of(kernels, x, weight, bias, residual)
            got = kernels.linear(x, packed, bias, residual.clone())
            assert_close(got, expected, BOUNDS[dtype])
            assert_close(kernels.linear(x, packed), product_of(kernels, x, weight), BOUNDS[dtype])
            if outputs % 64 == 0:
                gated = kernels.gated_linear(x, packed, bias)
                assert (gated == kernels.silu_mul(kernels.linear(x, packed, bias))).all()


@levels
@kinds
def test_a_row_gets_the_same_in_any_company(kernels, kind):
    """What rounding the product left over shows the last bits of its sums. With tiles, a row gets one result among few
    rows and another among many."""
    inputs, outputs = 768, 160
    weight = random_block_weight([(kind, outputs)], inputs)
    packed = kernels.pack_weight(weight)
    x = torch.randn(520, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = kernels.linear(x, packed, None, -kernels.linear(x, packed))
    rest = -kernels.linear(x, packed)
    for threads in (2, 70):
        torch.set_num_threads(threads)
        assert (kernels.linear(x, packed, None, rest.clone()) == expected).all()
    torch.set_num_threads(1)
    few = torch.cat([kernels.linear(part, packed) for part in x.split(TILE_ROWS - 1)])
    of_few = torch.cat([kernels.linear(x[i : i + 1], packed, None, -few[i : i + 1]) for i in range(len(x))])
    for first, many in ((0, 1), (1, 3), (519, 1), (2, 9), (5, TILE_ROWS - 1), (5, TILE_ROWS), (5, 40), (3, 100)):
        part = slice(first, first + many)
        if rounds_activations(kernels, many):
            assert (kernels.linear(x[part], packed, None, -few[part]) == of_few[part]).all()
        else:
            assert (kernels.linear(x[part], packed, None, rest[part].clone()) == expected[part]).all()
    if rounds_activations(kernels, len(x)):
        assert (of_few == expected).all()


def extreme_weight(kind: str, values: torch.Tensor) -> BlockWeight:
    """A weight of these numbers, [O, I], each the least (0) or the largest (1) of the type, with scales that are
    powers of two, so that every sum is exact in float32."""
    outputs, inputs = values.shape
    numbers = BY_NAME[kind].numbers
    bits = values.view(-1, numbers).to(torch.uint8)
    blocks = torch.zeros(len(bits), BY_NAME[kind].num_bytes, dtype=torch.uint8)
    for at in SCALES.get(kind, ()):
        blocks[:, at + 1] = 0x14  # 2**-10
    if kind in GROUPS:
        blocks[:, :4], blocks[:, 4] = torch.tensor([2.0**-10]).view(torch.uint8), 8
        halves = bits.view(len(bits), -1, 2, 16) * 15
        blocks[:, 8:] = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    elif kind == "Q8_0":
        blocks[:, 2:] = bits + 127  # 127, or -128
    elif kind == "Q4_0":
        blocks[:, 2:] = bits[:, :16] * 15 | bits[:, 16:] * 15 << 4
    else:
        if kind == "Q6_K":
            halves = bits.view(-1, 2, 4, 32) * 15
            blocks[:, :128] = torch.stack([halves[:, :, i] | halves[:, :, i + 2] << 4 for i in (0, 1)], 2).flatten(1)
            upper = bits.view(-1, 2, 4, 32) * 3
            blocks[:, 128:192] = sum(upper[:, :, i] << 2 * i for i in range(4)).flatten(1)
            blocks[:, 192:208] = 128  # -128
        else:
            blocks[:, 4:12] = 0xA0  # 32 for every group
            pairs = bits.view(-1, 4, 2, 32) * 15
            blocks[:, -128:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
            if kind == "Q5_K":
                blocks[:, 16:48] = sum(bits.view(-1, 8, 32)[:, i] << i for i in range(8))
    return BlockWeight.of(blocks.flatten(), [BlockPart(kind, outputs)], inputs)


@levels
@kinds
@pytest.mark.parametrize("rows", [1, 4, 6, 20])
def test_no_sum_saturates(kernels, kind, rows):
    """Numbers and activations at their extremes, all of one sign, of both, and at random: equal to the bit."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(0, 2, (32, 512), generator=generator)
    values[0], values[1], values[2] = 0, 1, torch.arange(512) % 2
    x = torch.randint(0, 2, (rows, 512), generator=generator) * 254.0 - 127
    x[0] = 127
    x[1:2] = -127
    x[2:3] = torch.where(values[2] > 0, 127.0, -127.0)
    weight = extreme_weight(kind, values)
    matrix = matrix_of(weight)
    assert (matrix[0].unique().numel(), matrix[1].unique().numel()) == (1, 1)
    assert matrix[0, 0] != matrix[1, 0]
    expected = (x.double() @ matrix.double().T).float()
    assert torch.equal(reference.linear(x, weight), expected)
    assert torch.equal(kernels.linear(x, kernels.pack_weight(weight)), expected)


@levels
@kinds
def test_every_number_lies_where_it_is_read(kernels, kind):
    weight = random_block_weight([(kind, 64)], 512, seed=5)
    packed, matrix = kernels.pack_weight(weight), matrix_of(weight)
    x = torch.eye(512) * 2.0**-5 * 127
    for many in (512, 6):  # expanded first, or read as it lies
        got = torch.cat([kernels.linear(part, packed) for part in x.split(many)])
        assert_close(got, (matrix.T * 2.0**-5 * 127).contiguous(), 2e-6)
    # In bfloat16, each result is rounded, and with tiles each number of the weight.
    got, expected = kernels.linear(x.bfloat16(), packed).T.float(), matrix * 2.0**-5 * 127
    assert ((got - expected).abs() <= expected.abs() * 2.0**-7 + expected.abs().max() * 2.0**-14).all()
    indices = torch.tensor([63, 0, 31, 32, 7], dtype=torch.int32)
    assert torch.equal(kernels.take_rows(packed, indices), matrix[indices])
    assert torch.equal(kernels.take_rows(packed, indices, torch.bfloat16), matrix[indices].bfloat16())
    with pytest.raises(IndexError, match="row 64 of a weight with 64"):
        kernels.take_rows(packed, torch.tensor([1, 64]))


@levels
@dtypes
def test_parts_of_several_types(kernels, dtype):
    weight = random_block_weight([("Q4_K", 96), ("Q6_K", 32), ("Q8_0", 64)], 512)
    packed = kernels.pack_weight(weight)
    for rows in (1, 9, 30):
        x, bias = torch.randn(rows, 512).to(dtype), torch.randn(192).to(dtype)
        residual = torch.randn(rows, 192).to(dtype)
        got = kernels.linear(x, packed, bias, residual.clone())
        assert_close(got, product_of(kernels, x, weight, bias, residual), BOUNDS[dtype])
        gated = kernels.gated_linear(x, packed, bias)
        assert (gated == kernels.silu_mul(kernels.linear(x, packed, bias))).all()
    with pytest.raises(ValueError, match="several types"):
        kernels.take_rows(packed, torch.tensor([0]))


@levels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_row(kernels, kind, value):
    weight = random_block_weight([(kind, 32)], 512)
    packed = kernels.pack_weight(weight)
    x = torch.randn(7, 512)
    expected = kernels.linear(x, packed)
    x[3, 400] = value
    got = kernels.linear(x, packed)
    assert got[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got[others], expected[others])


@levels
def test_what_cannot_be_packed_is_computed_as_it_is(kernels):
    weight = random_block_weight([("Q4_K", 40)], 256)
    assert kernels.pack_weight(weight) is weight
    x = torch.randn(3, 256)
    assert torch.equal(kernels.linear(x, weight), reference.linear(x, weight))
    assert torch.equal(kernels.take_rows(weight, torch.tensor([39])), matrix_of(weight)[39:])
    packed = kernels.pack_weight(random_block_weight([("Q4_K", 64)], 256))
    assert kernels.pack_weight(packed) is packed
    for wrong in (x[:, :128], x.double()):
        with pytest.raises(ValueError, match="packed blocks of 256 inputs"):
            kernels.linear(wrong, packed)


@pytest.mark.skipif(not KERNELS, reason="the library is not there")
def test_a_named_level_is_held_to_its_own_instructions(monkeypatch):
    loaded = library.load()
    for kernels in KERNELS:
        monkeypatch.setenv(library.VARIABLE, name_of(kernels))
        assert library.wanted_level(loaded) == kernels.level
        own = kernels.level >= library.Level.AVX512 and library.has_vnni(loaded, kernels.level)
        assert library.wants_vnni(loaded, kernels.level) == (kernels.vnni or own)
    monkeypatch.delenv(library.VARIABLE)
    best = library.wanted_level(loaded)
    assert library.wants_vnni(loaded, best) == library.has_vnni(loaded, best)
