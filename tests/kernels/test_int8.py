"""Products with int8 weights: what quantization is, and every variant and level against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.kernels import dispatch, reference, torch_ops
from weft.kernels.cpu import library, ops, tensors
from weft.kernels.quantize import LARGEST, dequantize, quantize

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest difference from the reference, relative to the largest value of it: as for every variant."""
C_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""The same for the kernels in C++, which round once, as the reference does."""

try:
    LOADED = library.load()
    LEVELS = [ops.CpuKernels(LOADED, level) for level in library.levels(LOADED)]
except library.KernelsUnavailable:
    LEVELS = []
levels = pytest.mark.parametrize("kernels", LEVELS, ids=[k.level.name.lower() for k in LEVELS])
PACKING = [
    (kernels, dtype)
    for kernels in LEVELS
    for dtype in C_BOUNDS
    if kernels.pack_weight(torch.zeros(32, 32, dtype=torch.int8), dtype).dim() != 2
]
packing = pytest.mark.parametrize(
    ("kernels", "dtype"), PACKING, ids=[f"{k.level.name.lower()} {str(dtype).split('.')[1]}" for k, dtype in PACKING]
)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_close(got, expected, bound):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    largest = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert ((got - expected).abs() <= bound * largest).all()


def random_weight(outputs, inputs, seed=0):
    """An int8 weight whose rows differ a thousandfold in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, outputs)[torch.randperm(outputs, generator=generator), None]
    return quantize(torch.randn(outputs, inputs, generator=generator) * sizes)


# What quantization is


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_within_half_a_step(dtype):
    weight = (torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 3, 40)[:, None]).to(
        dtype
    )
    values, scales = quantize(weight)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (40,))
    assert (values.int().abs().amax(-1) == LARGEST).all()
    errors = (dequantize(values, scales, torch.float64) - weight.double()).abs()
    assert (errors <= scales.double()[:, None] * (0.5 + 1e-4)).all()
    assert (errors > 0).any()


def test_ties_are_rounded_to_even_and_signs_are_symmetric():
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 0.0]])
    values, scales = quantize(weight)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -127, 0]]
    assert scales.tolist() == [1.0]
    assert torch.equal(quantize(-weight).values, -values)


def test_a_row_of_zeros_stays_zero():
    values, scales = quantize(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert values.tolist() == [[0, 0], [64, -127]]
    assert scales[0] == 0
    assert (dequantize(values, scales, torch.float32)[0] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_has_no_scale_is_refused(value):
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight)


# Every variant against the reference


def test_the_reference_is_the_product_with_what_the_weight_stands_for():
    values, scales = random_weight(40, 24)
    x, bias, residual = torch.randn(3, 24).double(), torch.randn(40).double(), torch.randn(3, 40).double()
    weight = dequantize(values, scales, torch.float64)
    got = reference.linear(x, values, bias, residual, scales)
    torch.testing.assert_close(got, x @ weight.T + bias + residual)
    gated = reference.gated_linear(x, values, bias, scales)
    torch.testing.assert_close(gated, reference.gated_linear(x, weight, bias))


HERE = [v for v in dispatch.REGISTRY["linear"] if v.supports(torch.device("cpu"), torch.float32)][:-1]


@pytest.mark.parametrize("variant", [v.name for v in HERE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("options", [(False, False), (True, False), (False, True), (True, True)])
def test_linear(variant, dtype, tokens, options):
    kernels = next(v for v in HERE if v.name == variant).load()
    torch.manual_seed(tokens)
    values, scales = random_weight(96, 64)
    x = torch.randn(tokens, 64).to(dtype)
    bias = torch.randn(96).to(dtype) if options[0] else None
    residual = torch.randn(tokens, 96).to(dtype) if options[1] else None
    expected = reference.linear(x, values, bias, residual, scales)
    kept = None if residual is None else residual.clone()
    assert_close(kernels.linear(x, kernels.pack_weight(values, dtype), bias, kept, scales), expected, BOUNDS[dtype])
    gated = kernels.gated_linear(x, kernels.pack_weight(values, dtype), bias, scales)
    product = kernels.linear(x, kernels.pack_weight(values, dtype), bias, scales=scales)
    assert_close(gated, reference.silu_mul(product), BOUNDS[dtype])


def test_torch_widens_a_weight_block_by_block(monkeypatch):
    values, scales = random_weight(70, 24)
    x = torch.randn(9, 24)
    whole = torch_ops.linear(x, values, scales=scales)
    monkeypatch.setattr(torch_ops, "DEQUANTIZED_BYTES", 17 * 24 * 4)
    assert_close(torch_ops.linear(x, values, scales=scales), whole, 1e-6)


# The kernels in C++


def test_int8_is_packed_at_every_level_with_instructions_for_it():
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    for kernels in LEVELS:
        packed = {dtype for other, dtype in PACKING if other is kernels}
        if kernels.level >= library.Level.AVX512:
            assert packed == ({torch.bfloat16} if " avx512vbmi " in flags else set())
        else:
            assert packed == ({torch.float32, torch.bfloat16} if kernels.level > library.Level.PORTABLE else set())


@levels
@pytest.mark.parametrize("dtype", list(C_BOUNDS), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 31])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (77, 128), (33, 50), (5, 32), (1, 1)])
@pytest.mark.parametrize("options", [(False, False), (True, True)])
def test_weights_that_are_not_packed(kernels, dtype, tokens, outputs, inputs, options, monkeypatch):
    monkeypatch.setattr(tensors, "THIN_ROWS_INT8", {kernels.level: 1000})
    values, scales = random_weight(outputs, inputs)
    x = torch.randn(tokens, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if options[0] else None
    residual = torch.randn(tokens, outputs).to(dtype) if options[1] else None
    expected = reference.linear(x, values, bias, residual, scales)
    got = kernels.linear(x, values, bias, None if residual is None else residual.clone(), scales)
    assert_close(got, expected, C_BOUNDS[dtype])
    torch.set_num_threads(1)
    for row in {0, tokens - 1}:
        part = slice(row, row + 1)
        alone = kernels.linear(x[part], values, bias, None if residual is None else residual[part].clone(), scales)
        assert (alone == got[part]).all()


@packing
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 96), (96, 2080), (1024, 1536), (160, 512)])
def test_product_with_a_packed_weight(kernels, dtype, outputs, inputs):
    generator = torch.Generator().manual_seed(0)
    values, scales = random_weight(outputs, inputs)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    packed = kernels.pack_weight(values, dtype)
    assert (packed.dtype, packed.shape) == (torch.int8, (outputs // 32, inputs // 32, 32, 32))
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 31, 33, 65, 300, 520, 1100):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        residual = torch.randn(rows, outputs, generator=generator).to(dtype)
        expected = reference.linear(x, values, bias, residual, scales)
        got = kernels.linear(x, packed, bias, residual.clone(), scales)
        assert_close(got, expected, C_BOUNDS[dtype])
        assert_close(
            kernels.linear(x, packed, scales=scales), reference.linear(x, values, scales=scales), C_BOUNDS[dtype]
        )
        if outputs % 64 == 0:
            gated = kernels.gated_linear(x, packed, bias, scales)
            assert_close(gated, reference.gated_linear(x, values, bias, scales), C_BOUNDS[dtype])
            assert (gated == kernels.silu_mul(kernels.linear(x, packed, bias, scales=scales))).all()
        for threads in (1, 3, 70):
            torch.set_num_threads(threads)
            assert (kernels.linear(x, packed, bias, residual.clone(), scales) == got).all()
        torch.set_num_threads(2)
        # The same in any company. What rounding the product left over shows the last bits of its sums.
        rest = -kernels.linear(x, packed, scales=scales)
        left_over = kernels.linear(x, packed, None, rest.clone(), scales)
        for first, many in ((0, 1), (1, 3), (rows // 2, 4), (2, 9), (5, 40)):
            part = slice(first, first + many)
            fewer = kernels.linear(x[part], packed, bias, residual[part].clone(), scales)
            assert (fewer == got[part]).all()
            assert (kernels.linear(x[part], packed, None, rest[part].clone(), scales) == left_over[part]).all()


@packing
def test_every_value_that_there_is_is_multiplied(kernels, dtype):
    values = torch.arange(-LARGEST, LARGEST + 1, dtype=torch.int8).repeat(5)[:1024].reshape(32, 32)
    scales = torch.full((32,), 0.5)
    packed = kernels.pack_weight(values, dtype)
    for rows in (1, 4, 40):
        for column in range(32):
            x = torch.zeros(rows, 32, dtype=dtype)
            x[:, column] = 2.0
            got = kernels.linear(x, packed, scales=scales)
            assert (got == values[:, column].to(dtype)).all()


@packing
def test_a_packed_weight_refuses_what_does_not_fit_it(kernels, dtype):
    values, scales = random_weight(64, 64)
    packed, x = kernels.pack_weight(values, dtype), torch.zeros(2, 64, dtype=dtype)
    with pytest.raises(ValueError, match="64 inputs"):
        kernels.linear(x[:, :32], packed, scales=scales)
    with pytest.raises(ValueError, match="float64"):
        kernels.linear(x.double(), packed, scales=scales)
    for wrong in (None, scales[:32], scales.double()):
        with pytest.raises(ValueError, match="64 outputs with"):
            kernels.linear(x, packed, scales=wrong)
    assert kernels.pack_weight(values[:48], dtype).shape == (48, 64)
    assert kernels.pack_weight(values, torch.float64) is values
