"""Every variant of every operation that runs on a CPU against the reference; `test_triton.py` has the others."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.batches import random_case
from weft.kernels import dispatch, reference
from weft.kernels.base import HeadNorm, HeadShape, Norm
from weft.kernels.batch import lower

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest difference from the reference, relative to the largest value of it. The reference rounds once, at the end;
a variant may round intermediate results to its dtype, whose unit is 2**-8 for bfloat16 and 2**-11 for float16."""


def variants(operation):
    here = [v for v in dispatch.REGISTRY[operation] if v.supports(torch.device("cpu"), torch.float32)]
    assert here[-1].name == reference.NAME
    return pytest.mark.parametrize("kernel", [v.function for v in here[:-1]], ids=[v.name for v in here[:-1]])


def assert_close(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    largest = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert ((got - expected).abs() <= BOUNDS[got.dtype] * largest).all()


row_lists = st.lists(
    st.tuples(st.sampled_from([0, 1, 1, 1, 2, 3, 7, 17, 24]), st.integers(0, 60)).map(lambda r: (r[0], r[0] + r[1])),
    min_size=1,
    max_size=9,
).filter(lambda rows: any(q for q, _ in rows))


@variants("attention")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=row_lists,
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    page_size=st.sampled_from([8, 16]),
    window=st.sampled_from([None, None, 1, 5, 30]),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from([{}, {}, {"causal": False}, {"visibility": True}, {"masks": True}, {"unwritten": True}]),
    seed=st.integers(0, 99),
)
def test_attention(kernel, rows, heads, page_size, window, dtype, options, seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng, rows, heads=heads[0], kv_heads=heads[1], page_size=page_size, dtype=dtype, **options)
    before = case.kv.clone()
    expected = reference.attention(case.q, case.kv, case.batch, 0.25, window)
    # Twice: a second layer follows the plan that the first one made.
    for _ in range(2):
        assert_close(kernel(case.q, case.kv, case.batch, 0.25, window), expected)
    torch.testing.assert_close(case.kv, before, equal_nan=True, rtol=0, atol=0)


@variants("attention")
def test_attention_of_rows_without_entries_or_queries(kernel):
    case = random_case(np.random.default_rng(1), [(2, 0), (0, 5), (3, 1), (1, 4)])
    expected = reference.attention(case.q, case.kv, case.batch, 1.0)
    assert_close(kernel(case.q, case.kv, case.batch, 1.0), expected)
    empty = random_case(np.random.default_rng(1), [(0, 5)])
    assert kernel(empty.q, empty.kv, empty.batch, 1.0).shape == (0, 64)


@variants("attention")
@pytest.mark.parametrize("ahead", [1, 2, 30])
def test_attention_of_queries_whose_window_is_past_the_entries(kernel, ahead):
    case = random_case(np.random.default_rng(4), [(1, 5), (1, 9), (20, 20)])
    forward = msgspec.structs.replace(case.forward, positions=case.forward.positions + np.int32(ahead))
    batch = lower(forward, 8)
    expected = reference.attention(case.q, case.kv, batch, 1.0, 2)
    assert (expected[:2] == 0).all() == (ahead > 1)
    assert_close(kernel(case.q, case.kv, batch, 1.0, 2), expected)


@variants("attention")
def test_attention_of_more_rows_than_one_group_holds(kernel):
    rows = [(1, k) for k in range(200, 1000, 25)] + [(40, 300), (30, 30)]
    case = random_case(np.random.default_rng(2), rows, heads=16, kv_heads=8, head_dim=64, page_size=16)
    assert_close(kernel(case.q, case.kv, case.batch, 0.1), reference.attention(case.q, case.kv, case.batch, 0.1))


@variants("rotate_and_store")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("unwritten", [False, True])
def test_rotate_and_store(kernel, dtype, normed, unwritten):
    case = random_case(np.random.default_rng(3), [(5, 9), (1, 17), (3, 3)], dtype=dtype, unwritten=unwritten)
    shape = HeadShape(4, 2, 16)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(9, 8 * 16, generator=generator).to(dtype)
    angles = torch.randn(9, 8, generator=generator) * 10
    weights = (torch.randn(2, 16, generator=generator) * 0.1 + 1).to(dtype)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
    results = []
    for function in (reference.rotate_and_store, kernel):
        kv = torch.full_like(case.kv, float("nan"))
        results.append((function(qkv.clone(), shape, (angles.cos(), angles.sin()), norm, case.batch, kv), kv))
    (expected, expected_kv), (got, got_kv) = results
    assert_close(got, expected)
    assert (got_kv.isnan() == expected_kv.isnan()).all()
    assert_close(got_kv.nan_to_num(), expected_kv.nan_to_num())


@variants("linear")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("options", [(False, False), (True, False), (False, True), (True, True)])
def test_linear(kernel, dtype, tokens, options):
    x, weight = torch.randn(tokens, 24).to(dtype), torch.randn(40, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if options[0] else None
    residual = torch.randn(tokens, 40).to(dtype) if options[1] else None
    expected = reference.linear(x, weight, bias, residual)
    assert_close(kernel(x, weight, bias, residual), expected)


@variants("linear_rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("options", [(False, False), (True, False), (False, True), (True, True)])
def test_linear_rms_norm(kernel, dtype, tokens, options):
    x, residual = torch.randn(tokens, 24).to(dtype), torch.randn(tokens, 40).to(dtype)
    weight = torch.randn(40, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if options[0] else None
    norm = Norm(torch.randn(40).to(dtype), 1e-5)
    expected = reference.linear_rms_norm(x, weight, residual.clone(), norm, bias)
    got = kernel(x, weight, residual, norm, bias)
    assert_close(got.total, expected.total)
    assert_close(got.normed, expected.normed)
    assert_close(got.normed, reference.rms_norm(got.total, norm.weight, norm.eps))


@variants("rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (7, 24), (5, 3, 16)])
def test_rms_norm(kernel, dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    assert_close(kernel(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert (x == before).all()


@variants("rms_norm")
def test_rms_norm_of_tiny_values_is_bounded_by_eps(kernel):
    x = torch.full((2, 8), 1e-25)
    assert_close(kernel(x, torch.ones(8), 1e-6), torch.full((2, 8), 1e-22))


@variants("silu_mul")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_silu_mul(kernel, dtype, tokens):
    gate_up = (torch.randn(tokens, 32) * 3).to(dtype)
    expected = reference.silu_mul(gate_up.clone())
    assert_close(
        kernel(
            gate_up,
        ),
        expected,
    )


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_copies(name):
    kernels = dispatch.select("cpu", torch.float32, prefer={"*": name})
    kv = torch.randn(6, 2, 2, 8, 4)
    before = kv.clone()
    kernels.copy_pages(kv, torch.tensor([1, 3]), torch.tensor([4, 0]))
    assert (kv[4] == before[1]).all()
    assert (kv[0] == before[3]).all()
    assert (kv[[1, 2, 3, 5]] == before[[1, 2, 3, 5]]).all()
    # A chain: every source is read before a destination is written.
    before = kv.clone()
    kernels.copy_slots(kv, torch.tensor([8, 9, 47]), torch.tensor([9, 10, 16]))
    for source, destination in ((8, 9), (9, 10), (47, 16)):
        there = before[source // 8, :, :, source % 8]
        assert (kv[destination // 8, :, :, destination % 8] == there).all()


@pytest.mark.parametrize(
    "name", [variant.name for variant in dispatch.REGISTRY["prepare_move"] if variant.name != "triton"]
)
@pytest.mark.parametrize("widths", [(3,), (1, 7, 64), (4096, 40_000, 256)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_pages_move_between_pools(name: str, widths: tuple[int, ...], count: int):
    kernels = dispatch.select("cpu", torch.float64, prefer={"prepare_move": name})
    layers = [torch.randint(0, 256, (7, width), dtype=torch.uint8) for width in widths]
    rows = torch.randint(0, 256, (6, sum(widths) + 2), dtype=torch.uint8)  # pages lie further apart than they are long
    host = torch.split(rows[:, :-2], list(widths), dim=1)
    before_layers, before_rows = [layer.clone() for layer in layers], rows.clone()
    device_pages, host_pages = torch.randperm(7)[:count], torch.randperm(6)[:count]
    kernels.prepare_move(layers, host)(device_pages, host_pages)
    expected = before_rows.clone()
    expected[host_pages, :-2] = torch.cat([layer[device_pages] for layer in before_layers], dim=1)
    assert torch.equal(rows, expected)
    assert all(map(torch.equal, layers, before_layers))
    others = torch.randperm(7)[:count]
    kernels.prepare_move(host, layers)(host_pages, others)
    for layer, before, part in zip(layers, before_layers, host, strict=True):
        before[others] = part[host_pages]
        assert torch.equal(layer, before)
