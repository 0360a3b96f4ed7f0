"""The kernels in C++ at every level that this machine runs, against the reference."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.batches import random_case
from weft import native
from weft.core.step import ForwardBatch
from weft.kernels import dispatch, reference, torch_attention, torch_ops
from weft.kernels.base import HeadNorm, HeadShape
from weft.kernels.batch import lower
from weft.kernels.cpu import build, huge_pages, library, ops, tensors

try:
    LOADED = library.load()
except library.KernelsUnavailable as reason:
    pytest.skip(f"the library is {reason}", allow_module_level=True)

KERNELS = [ops.CpuKernels(LOADED, level) for level in library.levels(LOADED)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Largest difference from the reference, relative to the largest value of it. In bfloat16, whose unit is 2**-8, the
result is rounded once as the reference's is, and softmax weights once more where there are instructions for it."""
SHAPES = [(16, 8, 128), (4, 2, 16), (6, 1, 48), (3, 3, 80), (8, 2, 64), (4, 4, 96), (32, 2, 32), (2, 1, 256)]

levels = pytest.mark.parametrize("kernels", KERNELS, ids=[k.level.name.lower() for k in KERNELS])
dtypes = pytest.mark.parametrize("dtype", list(BOUNDS), ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_close(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    largest = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert ((got.float() - expected.float()).abs() <= BOUNDS[got.dtype] * largest).all()


def test_every_level_of_the_library_is_here():
    assert [k.level for k in KERNELS] == sorted((k.level for k in KERNELS), reverse=True)
    assert KERNELS[-1].level == library.Level.PORTABLE


def test_threads_that_call_at_once_have_teams_of_their_own():
    x, weight = torch.randn(64, 256), torch.randn(256)
    expected = KERNELS[0].rms_norm(x, weight, 1e-5)

    def call(_: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(KERNELS[0].rms_norm(x, weight, 1e-5), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(8)))


def test_more_threads_than_before_and_fewer_again():
    x, weight = torch.randn(512, 256), torch.randn(256)
    results = []
    for threads in (1, 2, 5, 3, 1, 4):
        torch.set_num_threads(threads)
        results.append(KERNELS[0].rms_norm(x, weight, 1e-5))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_child_of_a_process_with_threads_has_threads_too():
    script = """
import os, torch
from weft.kernels.cpu import ops
torch.set_num_threads(2)
x, weight = torch.randn(512, 256), torch.randn(256)
expected = ops.best().rms_norm(x, weight, 1e-5)
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    os._exit(0 if torch.equal(ops.best().rms_norm(x, weight, 1e-5), expected) else 7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=120, check=False)
    assert done.returncode == 0


@levels
@pytest.mark.parametrize("rows", [[(1, 1), (1, 20)], [(1, 9), (2, 8), (1, 600)], [(20, 20)]])
def test_scores_that_are_nan_give_nan(kernels, rows):
    """A query whose scores are no numbers is not one without entries."""
    case = random_case(np.random.default_rng(0), rows)
    q = torch.full_like(case.q, float("nan"))
    assert kernels.attention(q, case.kv, case.batch, 0.25, None).isnan().all()


row_lists = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 600)),
        st.tuples(st.integers(0, 9), st.integers(0, 80)),
        st.tuples(st.integers(10, 150), st.integers(0, 150)),
    ).map(lambda row: (row[0], max(row) if row[0] == 1 else row[0] + row[1])),
    min_size=1,
    max_size=5,
).filter(lambda rows: any(q for q, _ in rows))


@levels
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=row_lists,
    shape=st.sampled_from(SHAPES),
    page_size=st.sampled_from([8, 16, 32]),
    window=st.sampled_from([None, None, 1, 50, 300]),
    dtype=st.sampled_from(list(BOUNDS)),
    options=st.sampled_from(
        [{}, {}, {"causal": False}, {"visibility": True}, {"masks": True}, {"visibility": True, "masks": True}]
    ),
    seed=st.integers(0, 99),
)
def test_attention(kernels, rows, shape, page_size, window, dtype, options, seed):
    heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    case = random_case(
        rng, rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, **options
    )
    before = case.kv.clone()
    expected = reference.attention(case.q, case.kv, case.batch, head_dim**-0.5, window)
    assert_close(kernels.attention(case.q, case.kv, case.batch, head_dim**-0.5, window), expected)
    torch.testing.assert_close(case.kv, before, equal_nan=True, rtol=0, atol=0)


@levels
def test_attention_of_more_queries_than_entries(kernels):
    case = random_case(np.random.default_rng(1), [(2, 0), (40, 30), (0, 5), (3, 1), (1, 4)])
    expected = reference.attention(case.q, case.kv, case.batch, 1.0)
    assert_close(kernels.attention(case.q, case.kv, case.batch, 1.0), expected)


PACKING = [k for k in KERNELS if k.level > library.Level.PORTABLE]
packing = pytest.mark.parametrize("kernels", PACKING, ids=[k.level.name.lower() for k in PACKING])


def packed_in_order(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [O, I] as `pack_weight` should leave it: in steps of two blocks of 16 outputs."""
    outputs, inputs = weight.shape
    if weight.dtype == torch.bfloat16:  # pairs of inputs
        return weight.view(outputs // 32, 2, 16, inputs // 32, 16, 2).permute(0, 3, 1, 4, 2, 5)
    return weight.view(outputs // 32, 2, 16, inputs // 32, 32).permute(0, 3, 1, 4, 2)


@levels
@dtypes
def test_every_level_but_the_portable_one_packs(kernels, dtype):
    packs = kernels.pack_weight(torch.zeros(32, 64, dtype=dtype)).shape == (1, 2, 32, 32)
    assert packs == (kernels.level > library.Level.PORTABLE)
    assert kernels.packs(dtype) == packs
    assert not kernels.packs(torch.float16)


@packing
@dtypes
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(32, 32), (64, 96), (96, 2080), (1024, 384), (160, 512), pytest.param(1024, 1536, marks=pytest.mark.soak)],
)
def test_product_with_a_packed_weight(kernels, dtype, outputs, inputs):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    packed = kernels.pack_weight(weight)
    assert (packed == packed_in_order(weight).reshape(packed.shape)).all()
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 31, 33, 65, 300, 520, 1100):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        residual = torch.randn(rows, outputs, generator=generator).to(dtype)
        expected = reference.linear(x, weight, bias, residual)
        got = kernels.linear(x, packed, bias, residual.clone())
        assert_close(got, expected)
        assert_close(kernels.linear(x, packed), reference.linear(x, weight))
        if outputs % 64 == 0:
            gated = kernels.gated_linear(x, packed, bias)
            assert_close(gated, reference.gated_linear(x, weight, bias))
            assert (gated == kernels.silu_mul(kernels.linear(x, packed, bias))).all()
        for threads in (1, 3, 70):
            torch.set_num_threads(threads)
            assert (kernels.linear(x, packed, bias, residual.clone()) == got).all()
        torch.set_num_threads(2)
        # The same in any company. What rounding the product left over shows the last bits of its sums.
        rest = -kernels.linear(x, packed)
        left_over = kernels.linear(x, packed, None, rest.clone())
        for first, many in ((0, 1), (1, 3), (rows // 2, 4), (2, 9), (5, 40), (97, 1)):
            part = slice(first, first + many)
            fewer = kernels.linear(x[part], packed, bias, residual[part].clone())
            assert (fewer == got[part]).all()
            assert (kernels.linear(x[part], packed, None, rest[part].clone()) == left_over[part]).all()


@packing
@dtypes
def test_rows_are_taken_from_a_packed_weight_as_they_were(kernels, dtype):
    weight = torch.randn(96, 160).to(dtype)
    packed = kernels.pack_weight(weight)
    for indices in ([], [0], [95, 0, 31, 32, 16, 95], list(range(96))):
        for integers in (torch.int64, torch.int32):
            taken = kernels.take_rows(packed, torch.tensor(indices, dtype=integers))
            assert torch.equal(taken, weight[indices])
    assert torch.equal(kernels.take_rows(weight, torch.tensor([5, 5])), weight[[5, 5]])
    for beyond in (-1, 96):
        with pytest.raises(IndexError, match=f"row {beyond} of a weight with 96"):
            kernels.take_rows(packed, torch.tensor([3, beyond]))


@packing
def test_a_weight_that_panels_do_not_divide_stays_as_it_is(kernels):
    for dtype, shape in itertools.product(BOUNDS, ((48, 64), (64, 48))):
        weight = torch.zeros(shape, dtype=dtype)
        assert kernels.pack_weight(weight) is weight


@packing
def test_a_packed_weight_refuses_what_does_not_fit_it(kernels):
    packed = kernels.pack_weight(torch.zeros(64, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="64 inputs"):
        kernels.linear(torch.zeros(2, 32, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="float32"):
        kernels.linear(torch.zeros(2, 64), packed)


@levels
@dtypes
def test_a_row_attends_the_same_in_any_company_on_any_threads(kernels, dtype):
    rows = [(1, 700), (90, 200), (1, 33), (4, 300), (1, 256), (20, 20)]
    case = random_case(np.random.default_rng(2), rows, heads=4, kv_heads=1, head_dim=64, page_size=16, dtype=dtype)
    together = kernels.attention(case.q, case.kv, case.batch, 0.1)
    torch.set_num_threads(1)
    assert (kernels.attention(case.q, case.kv, case.batch, 0.1) == together).all()
    for row in range(len(rows)):
        alone, q = _only(case, row)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            first, last = case.batch.q_indptr_host[row : row + 2]
            assert (kernels.attention(q, case.kv, alone, 0.1) == together[first:last]).all()


def _only(case, row):
    """The batch of one row of a case, and its queries."""
    f = case.forward
    tokens = slice(*f.q_indptr[row : row + 2].tolist())
    pages = slice(*f.kv_indptr[row : row + 2].tolist())
    forward = ForwardBatch(
        token_ids=f.token_ids[tokens],
        positions=f.positions[tokens],
        write_slots=f.write_slots[tokens],
        q_indptr=np.array([0, tokens.stop - tokens.start], np.int32),
        kv_indptr=np.array([0, pages.stop - pages.start], np.int32),
        kv_page_ids=f.kv_page_ids[pages],
        kv_lens=f.kv_lens[row : row + 1],
    )
    return lower(forward, case.batch.page_size), case.q[tokens]


@levels
def test_attention_reads_queries_between_keys_and_values(kernels):
    case = random_case(np.random.default_rng(3), [(30, 50), (1, 60)], head_dim=32)
    wide = torch.full((31, 8, 32), float("nan"))
    wide[:, :4] = case.q
    expected = reference.attention(case.q, case.kv, case.batch, 0.2)
    assert_close(kernels.attention(wide[:, :4], case.kv, case.batch, 0.2), expected)


@levels
@dtypes
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_attention_of_extreme_scores(kernels, dtype, extreme):
    case = random_case(np.random.default_rng(4), [(1, 300), (70, 90)], head_dim=64, dtype=dtype)
    # Powers of two, so that bfloat16 products are exact and the largest score is the same for everyone.
    q = torch.full_like(case.q, 2.0)
    expected = reference.attention(q, case.kv, case.batch, extreme / 100)
    got = kernels.attention(q, case.kv, case.batch, extreme / 100)
    assert torch.isfinite(got).all()
    assert_close(got, expected)


@levels
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_store(kernels, dtype, shape, normed):
    heads, kv_heads, head_dim = shape
    case = random_case(
        np.random.default_rng(5),
        [(5, 9), (1, 17), (33, 33)],
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        unwritten=True,
    )
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(39, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.randn(39, head_dim // 2, generator=generator) * 10
    weights = (torch.randn(2, head_dim, generator=generator) * 0.1 + 1).to(dtype)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
    results = []
    for function in (reference.rotate_and_store, kernels.rotate_and_store):
        kv = torch.full_like(case.kv, float("nan"))
        turned = function(qkv.clone(), HeadShape(*shape), (angles.cos(), angles.sin()), norm, case.batch, kv)
        results.append((turned, kv))
    (expected, expected_kv), (got, got_kv) = results
    assert_close(got, expected)
    assert (got_kv.isnan() == expected_kv.isnan()).all()
    assert_close(got_kv.nan_to_num(), expected_kv.nan_to_num())


@levels
@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 31, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (77, 128), (33, 50), (5, 32), (1, 1)])
@pytest.mark.parametrize("options", [(False, False), (True, True)])
def test_linear(kernels, dtype, tokens, outputs, inputs, options, monkeypatch):
    monkeypatch.setattr(tensors, "THIN_ROWS", {(kernels.level, dtype): 1000})
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if options[0] else None
    residual = torch.randn(tokens, outputs).to(dtype) if options[1] else None
    expected = reference.linear(x, weight, bias, residual)
    got = kernels.linear(x, weight, bias, None if residual is None else residual.clone())
    assert_close(got, expected)
    # A row among others, alone, and on one thread.
    torch.set_num_threads(1)
    for row in {0, tokens - 1}:
        part = slice(row, row + 1)
        alone = kernels.linear(x[part], weight, bias, None if residual is None else residual[part].clone())
        assert (alone == got[part]).all()


@levels
@dtypes
@pytest.mark.parametrize("shape", [(1, 24), (7, 1000), (5, 3, 16), (40, 1024), (3, 1)])
def test_rms_norm(kernels, dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert (x == before).all()


@levels
@dtypes
@pytest.mark.parametrize("shape", [(1, 32), (9, 100), (40, 2048), (2, 2)])
def test_silu_mul(kernels, dtype, shape):
    gate_up = (torch.randn(shape) * 3).to(dtype)
    assert_close(kernels.silu_mul(gate_up.clone()), reference.silu_mul(gate_up))


@levels
@dtypes
def test_silu_mul_of_extreme_values(kernels, dtype):
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, -1e-30, 0.0, 88.0, 1e30] * 8)
    gate_up = torch.cat((gate, torch.ones(64)))[None].to(dtype)
    got, expected = kernels.silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(got, expected, atol=1e-30, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)


@levels
def test_nan_is_not_hidden(kernels):
    x = torch.ones(2, 64)
    x[1, 3] = float("nan")
    for dtype in BOUNDS:
        y = x.to(dtype)
        for got in (kernels.rms_norm(y, torch.ones(64, dtype=dtype), 1e-6), kernels.silu_mul(y)):
            assert torch.isfinite(got[0]).all()
            assert got[1].isnan().any()


@pytest.mark.parametrize("operation", ["rms_norm", "silu_mul", "linear", "attention"])
def test_what_does_not_fit_goes_to_torch(operation, monkeypatch):
    taken = []
    owner = torch_attention if operation == "attention" else torch_ops
    monkeypatch.setattr(owner, operation, lambda *args: taken.append(operation))
    kernels, x = KERNELS[0], torch.ones(4, 8, dtype=torch.float64)
    case = random_case(np.random.default_rng(0), [(1, 3)], head_dim=24)
    arguments = {
        "rms_norm": (x, x[0], 1e-6),
        "silu_mul": (torch.ones(8, 4).T,),
        "linear": (x, x),
        "attention": (case.q, case.kv, case.batch, 1.0),
    }
    getattr(kernels, operation)(*arguments[operation])
    assert taken == [operation]


def test_the_environment_chooses_the_level(monkeypatch):
    choose = ops.best.__wrapped__
    for kernels in KERNELS:
        monkeypatch.setenv(library.VARIABLE, kernels.level.name.lower())
        assert choose().level == kernels.level
    monkeypatch.setenv(library.VARIABLE, "off")
    assert str(choose()) == "switched off by WEFT_CPU_KERNELS"
    monkeypatch.setenv(library.VARIABLE, "quantum")
    assert "'quantum'; this machine runs" in str(choose())
    monkeypatch.delenv(library.VARIABLE)
    assert choose().level == library.best_level(LOADED)


def test_dispatch_takes_the_best_level():
    if isinstance(ops.best(), ops.CpuKernels) and "WEFT_CPU_KERNELS" not in os.environ:
        assert dispatch.describe("cpu", torch.bfloat16)[0].note == f"C++: {library.best_level(LOADED).name.lower()}"
    assert dispatch.describe("cpu", torch.float64)[0].chosen == "torch"


def test_a_library_that_is_missing_or_broken_is_unavailable(tmp_path):
    with pytest.raises(library.KernelsUnavailable, match=r"weft\.kernels\.cpu\.build"):
        library.load(tmp_path / "none.so")
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(library.KernelsUnavailable, match="cannot be loaded"):
        library.load(broken)


def test_a_build_without_a_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(native.BuildError, match="missing"):
        build.build(tmp_path / "out.so")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.BuildError, match="no C"):
        build.build(tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()


@levels
def test_limits_count_what_they_do(kernels):
    data = torch.randn(2, 8192)
    assert kernels.probe_product(data, 4, threads=2) == 2 * kernels.probe_product(data, 4, threads=1)
    assert kernels.probe_product(data.bfloat16(), 6, threads=1) == 2 * kernels.probe_product(data.bfloat16(), 3, 1)
    kernels.probe_read(data, threads=2)


def test_large_memory_begins_with_a_huge_page_and_small_memory_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "ask", lambda tensor: asked.append(tensor.data_ptr()))
    large = huge_pages.empty(3, 1 << 20, dtype=torch.bfloat16)
    assert large.shape == (3, 1 << 20)
    assert large.dtype == torch.bfloat16
    assert large.is_contiguous()
    assert large.data_ptr() % huge_pages.PAGE_BYTES == 0
    assert asked == [large.data_ptr()]
    large.fill_(1)
    assert huge_pages.empty(10, dtype=torch.float32).shape == (10,)
    assert len(asked) == 1


def test_an_arena_fills_its_pieces(monkeypatch):
    monkeypatch.setattr(huge_pages, "PIECE_BYTES", 1 << 12)
    arena = huge_pages.Arena()
    sizes = (100, 1 << 11, 1, 1 << 11, 1 << 12, 1 << 13)
    made = [arena.empty(size, dtype=torch.uint8).fill_(i) for i, size in enumerate(sizes)]
    assert [len(tensor) for tensor in made] == list(sizes)
    assert all((tensor == i).all() for i, tensor in enumerate(made))
    first = made[0].data_ptr()
    assert [tensor.data_ptr() - first for tensor in made[:3]] == [0, 128, 128 + (1 << 11)]
    pieces = {tensor.untyped_storage().data_ptr() for tensor in made}
    assert len(pieces) == 4
    assert arena.empty(3, 5, dtype=torch.bfloat16).shape == (3, 5)
    assert arena.empty(0, dtype=torch.float32).shape == (0,)
