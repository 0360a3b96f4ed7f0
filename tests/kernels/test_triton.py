"""The kernels in Triton against the reference: on a CUDA device where there is one, else in Triton's interpreter.

Cases are few and small, because the interpreter takes milliseconds for what a device does in less than one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.kernels.batches import random_case
from weft.core.step import ForwardBatch
from weft.kernels import reference, torch_attention, torch_ops
from weft.kernels.base import HeadNorm, HeadShape, Norm
from weft.kernels.batch import lower

pytest.importorskip("triton")
from weft.kernels.triton import attention as triton_attention
from weft.kernels.triton import move as triton_move
from weft.kernels.triton import ops
from weft.kernels.triton.device import attention as attention_kernels
from weft.kernels.triton.device import blocks as block_kernels
from weft.kernels.triton.device import elementwise as other_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1 and there is no CUDA device", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest difference from the reference, relative to the largest value of it: as for every variant."""
CHUNK = triton_attention.CHUNK

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
"""NumPy's, for infinities and NaN that are meant."""
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])


@pytest.fixture(autouse=True)
def _nothing_goes_to_torch(monkeypatch):
    """A kernel that left its work to torch would agree with the reference, and prove nothing."""

    def refuse(*args):
        raise AssertionError("left to torch")

    monkeypatch.setattr(torch_attention, "attention", refuse)
    for name in ("rms_norm", "silu_mul", "rotate_and_store"):
        monkeypatch.setattr(torch_ops, name, refuse)


def assert_close(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bound = BOUNDS[got.dtype]
    got, expected = got.cpu().float(), expected.cpu().float()
    assert torch.isfinite(got).all()
    largest = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert ((got - expected).abs() <= bound * largest).all()


def assert_attends(case, window=None, scale=0.2):
    """The kernels and the reference agree on a case, which is left as it was."""
    kv = case.kv.clone().to(DEVICE)
    expected = reference.attention(case.q, case.kv, case.batch, scale, window)
    on_device = lower(case.forward, case.batch.page_size, DEVICE)
    assert_close(ops.attention(case.q.to(DEVICE), kv, on_device, scale, window), expected)
    torch.testing.assert_close(kv.cpu(), case.kv, equal_nan=True, rtol=0, atol=0)


MIXED = [(1, 20), (0, 4), (3, CHUNK + 37), (5, 5), (1, 2 * CHUNK + 1), (23, 70), (2, 1), (1, 0), (6, 0)]
"""Decoded and prefilled, split and whole, without queries, without entries, with fewer entries than queries."""
OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "visibility": {"visibility": True},
    "masks": {"masks": True},
    "everything": {"causal": False, "visibility": True, "masks": True, "unwritten": True},
}


@pytest.mark.parametrize(
    ("options", "window"),
    [("plain", None), ("plain", 21), ("not causal", None), ("visibility", 21), ("masks", None), ("everything", 21)],
)
def test_attention(options, window):
    case = random_case(np.random.default_rng(7), MIXED, heads=6, kv_heads=2, head_dim=32, **OPTIONS[options])
    assert_attends(case, window)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "page_size"),
    [
        (torch.bfloat16, 2, 2, 16, 32),
        (torch.float32, 7, 1, 48, 16),
        (torch.bfloat16, 4, 2, 80, 8),
        (torch.float16, 8, 1, 128, 16),
        (torch.bfloat16, 40, 1, 24, 32),
        (torch.float32, 3, 1, 256, 16),
        (torch.bfloat16, 2, 1, 256, 16),
        (torch.float32, 2, 1, 256, 32),
    ],
)
def test_attention_of_every_geometry(dtype, heads, kv_heads, head_dim, page_size):
    case = random_case(
        np.random.default_rng(3),
        [(1, CHUNK + 9), (19, 25)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    assert_attends(case, scale=head_dim**-0.5)


@dtypes
def test_attention_with_rules_in_every_dtype(dtype):
    rows = [(2, CHUNK + 9), (19, 40)]
    assert_attends(random_case(np.random.default_rng(5), rows, dtype=dtype, **OPTIONS["everything"]), window=30)


@pytest.mark.parametrize("ahead", [1, 2, 30])
def test_attention_of_queries_whose_window_is_past_the_entries(ahead):
    case = random_case(np.random.default_rng(4), [(1, 5), (1, CHUNK + 3), (20, 20)])
    forward = msgspec.structs.replace(case.forward, positions=case.forward.positions + np.int32(ahead))
    expected = reference.attention(case.q, case.kv, lower(forward, 8), 1.0, 2)
    assert (expected[:2] == 0).all() == (ahead > 1)
    got = ops.attention(case.q.to(DEVICE), case.kv.to(DEVICE), lower(forward, 8, DEVICE), 1.0, 2)
    assert_close(got, expected)


@pytest.mark.parametrize("window", [None, 1, 100, 290])
@pytest.mark.parametrize("hopper", [False, True])
def test_attention_to_blocks_that_all_queries_see(window, hopper, monkeypatch):
    monkeypatch.setattr(triton_attention, "is_hopper", lambda device: hopper)
    rows = [(40, 300), (7, 256), (6, 70), (2, 200)]
    options = {"heads": 4, "kv_heads": 1, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
    assert_attends(random_case(np.random.default_rng(1), rows, **options), window, 128**-0.5)


def test_many_splits_are_merged_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(triton_attention, "BLOCK_S", 2)
    assert_attends(random_case(np.random.default_rng(5), [(1, 5 * CHUNK + 1), (2, 3 * CHUNK)]), scale=1.0)


def test_a_row_that_sees_nothing_gets_zeros_however_often_it_is_split():
    case = random_case(np.random.default_rng(6), [(1, 3 * CHUNK), (20, 50)])
    blind = msgspec.structs.replace(case.forward, visibility=np.zeros(len(case.forward.kv_page_ids), np.uint32))
    kv = torch.full_like(case.kv, float("nan"), device=DEVICE)
    assert (ops.attention(case.q.to(DEVICE), kv, lower(blind, 8, DEVICE), 1.0) == 0).all()


@pytest.mark.parametrize("rows", [[(1, 2 * CHUNK)], [(20, 64)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("how", ["visibility", "masks", "window"])
def test_what_nobody_sees_may_be_anything(rows, how):
    case = random_case(np.random.default_rng(8), rows)
    (queries, entries), window, options = rows[0], None, {}
    if how == "visibility":
        hidden = np.arange(entries) % 3 == 1
        bits = (~hidden).reshape(-1, 8)
        options["visibility"] = (bits << np.arange(8)).sum(1).astype(np.uint32) | np.uint32(0xFFFFFF00)
    elif how == "masks":
        hidden = np.arange(entries) % 5 < 2
        options["mask_bits"] = np.packbits(np.tile(~hidden, (queries, 1)), axis=1, bitorder="little").ravel()
        options["mask_indptr"] = np.array([0, len(options["mask_bits"])], np.int32)
    else:
        window = 9
        hidden = np.arange(entries) < entries - queries + 1 - window
    forward = msgspec.structs.replace(case.forward, **options)
    pages = case.forward.kv_page_ids
    for entry in hidden.nonzero()[0]:
        case.kv[pages[entry // 8], :, :, entry % 8] = float("nan") if entry % 2 else float("inf")
    expected = reference.attention(case.q, case.kv, lower(forward, 8), 0.3, window)
    got = ops.attention(case.q.to(DEVICE), case.kv.to(DEVICE), lower(forward, 8, DEVICE), 0.3, window)
    assert_close(got, expected)


def test_nan_that_is_seen_is_not_hidden():
    case = random_case(np.random.default_rng(9), [(1, CHUNK + 9), (20, 20)])
    case.kv[case.forward.kv_page_ids] = float("nan")
    got = ops.attention(case.q.to(DEVICE), case.kv.to(DEVICE), lower(case.forward, 8, DEVICE), 1.0)
    assert got.isnan().all()


@pytest.mark.parametrize("extreme", [100.0, -100.0, 0.0])
def test_attention_of_extreme_scores(extreme):
    case = random_case(np.random.default_rng(4), [(1, CHUNK + 44), (20, 30)], head_dim=64)
    case.q.fill_(2.0)
    assert_attends(case, scale=extreme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 40], ids=["no window", "window"])
def test_a_row_attends_the_same_in_any_company(dtype, window):
    rows = [(1, 2 * CHUNK + 30), (30, 50), (1, 33), (4, CHUNK + 5), (20, 20)]
    case = random_case(np.random.default_rng(2), rows, kv_heads=1, head_dim=64, page_size=16, dtype=dtype)
    words = np.full(len(case.forward.kv_page_ids), 0xFFFFFFFF, np.uint32)
    words[case.forward.kv_indptr[2]] = 0xFFFFFF0F  # a row that is not plain changes nothing for the others
    forward = msgspec.structs.replace(case.forward, visibility=words)
    kv = case.kv.to(DEVICE)
    together = ops.attention(case.q.to(DEVICE), kv, lower(forward, 16, DEVICE), 0.1, window)
    for row in range(len(rows)):
        tokens = slice(*forward.q_indptr[row : row + 2].tolist())
        alone = ops.attention(case.q[tokens].to(DEVICE), kv, lower(_only(forward, row), 16, DEVICE), 0.1, window)
        assert (alone == together[tokens]).all()


def _only(forward: ForwardBatch, row: int) -> ForwardBatch:
    tokens = slice(*forward.q_indptr[row : row + 2].tolist())
    pages = slice(*forward.kv_indptr[row : row + 2].tolist())
    words = forward.visibility[pages]
    return ForwardBatch(
        token_ids=forward.token_ids[tokens],
        positions=forward.positions[tokens],
        write_slots=forward.write_slots[tokens],
        q_indptr=np.array([0, tokens.stop - tokens.start], np.int32),
        kv_indptr=np.array([0, pages.stop - pages.start], np.int32),
        kv_page_ids=forward.kv_page_ids[pages],
        kv_lens=forward.kv_lens[row : row + 1],
        visibility=None if (words == 0xFFFFFFFF).all() else words,
    )


def test_attention_reads_queries_between_keys_and_values():
    case = random_case(np.random.default_rng(3), [(20, 50), (1, 60)], head_dim=32)
    wide = torch.full((21, 8, 32), float("nan"), device=DEVICE)
    wide[:, :4] = case.q
    expected = reference.attention(case.q, case.kv, case.batch, 0.2)
    got = ops.attention(wide[:, :4], case.kv.to(DEVICE), lower(case.forward, 8, DEVICE), 0.2)
    assert_close(got, expected)


def test_attention_of_no_queries():
    case = random_case(np.random.default_rng(1), [(0, 5)])
    got = ops.attention(case.q.to(DEVICE), case.kv.to(DEVICE), lower(case.forward, 8, DEVICE), 1.0)
    assert got.shape == (0, 64)


def test_a_plan_is_made_once_for_all_layers(monkeypatch):
    case = random_case(np.random.default_rng(1), [(1, 5), (9, 9)])
    batch = lower(case.forward, 8, DEVICE)
    first = ops.attention(case.q.to(DEVICE), case.kv.to(DEVICE), batch, 1.0)
    monkeypatch.setattr(triton_attention, "_plan", None)
    assert (ops.attention(case.q.to(DEVICE), case.kv.to(DEVICE), batch, 1.0) == first).all()


@dtypes
@pytest.mark.parametrize("shape", [(4, 2, 16), (7, 1, 48), (2, 1, 256)])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotate_and_store(dtype, shape, normed):
    heads, kv_heads, head_dim = shape
    case = random_case(
        np.random.default_rng(5),
        [(5, 9), (1, 17), (3, 3)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        unwritten=True,
    )
    assert (case.forward.write_slots < 0).any()
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(9, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.randn(9, head_dim // 2, generator=generator) * 10
    weights = (torch.randn(2, head_dim, generator=generator) * 0.1 + 1).to(dtype)
    kv = torch.full_like(case.kv, float("nan"))
    results = []
    for function, place in ((reference.rotate_and_store, "cpu"), (ops.rotate_and_store, DEVICE)):
        norm = HeadNorm(weights[0].to(place), weights[1].to(place), 1e-6) if normed else None
        rotation, target = (angles.cos().to(place), angles.sin().to(place)), kv.clone().to(place)
        batch = lower(case.forward, 8, place)
        q = function(qkv.clone().to(place), HeadShape(*shape), rotation, norm, batch, target)
        results.append((q, target.cpu()))
    (expected, expected_kv), (got, got_kv) = results
    assert_close(got, expected)
    assert (got_kv.isnan() == expected_kv.isnan()).all()
    assert_close(got_kv.nan_to_num(), expected_kv.nan_to_num())


@dtypes
@pytest.mark.parametrize("shape", [(0, 24), (1, 32), (4, 100), (3, 2, 48), (2, 1), (2, 2048)])
def test_rms_norm(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    there = x.clone().to(DEVICE)
    assert_close(ops.rms_norm(there, weight.to(DEVICE), 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert (there.cpu() == x).all()


def test_rms_norm_of_tiny_values_is_bounded_by_eps():
    x = torch.full((2, 8), 1e-25, device=DEVICE)
    got = ops.rms_norm(x, torch.ones(8, device=DEVICE), 1e-6)
    torch.testing.assert_close(got, torch.full_like(x, 1e-22), rtol=1e-5, atol=0)


@dtypes
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 100), (2, 4200), (2, 2)])
def test_silu_mul(dtype, shape):
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert_close(ops.silu_mul(gate_up.clone().to(DEVICE)), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_silu_mul_of_extreme_values(dtype):
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, -1e-30, 0.0, 88.0, 1e30])
    gate_up = torch.cat((gate, torch.ones(8)))[None].to(dtype)
    got, expected = ops.silu_mul(gate_up.to(DEVICE)).cpu(), reference.silu_mul(gate_up)
    torch.testing.assert_close(got, expected, atol=1e-30, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)


@dtypes
def test_nan_is_not_hidden(dtype):
    x = torch.ones(2, 64, dtype=dtype, device=DEVICE)
    x[1, 3] = float("nan")
    for got in (ops.rms_norm(x, torch.ones(64, dtype=dtype, device=DEVICE), 1e-6), ops.silu_mul(x)):
        assert torch.isfinite(got[0]).all()
        assert got[1].isnan().any()


@dtypes
def test_gated_linear(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((3, 24), (80, 24), (80,)))
    got = ops.gated_linear(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE))
    assert_close(got, reference.gated_linear(x, weight, bias))


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(0, 24), (1, 32), (5, 100), (2, 1), (2, 2048)])
def test_product_with_the_norm_of_its_sum(dtype, rows, size):
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 40), (size, 40), (rows, size), (size,), (size,))
    x, weight, residual, bias, norm_weight = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    expected = reference.linear_rms_norm(x, weight, residual, Norm(norm_weight, 1e-5), bias)
    there = residual.clone().to(DEVICE)
    got = ops.linear_rms_norm(
        *(x.to(DEVICE), weight.to(DEVICE), there, Norm(norm_weight.to(DEVICE), 1e-5), bias.to(DEVICE))
    )
    assert_close(got.total, expected.total)
    assert_close(got.normed, expected.normed)
    # What is normalised is the sum as it is stored.
    assert (got.normed == ops.rms_norm(got.total, norm_weight.to(DEVICE), 1e-5)).all()


@dtypes
def test_copies(dtype):
    kv = torch.randn(6, 2, 3, 8, 20).to(dtype).to(DEVICE)
    before = kv.clone()
    pairs = torch.tensor([[1, 4], [3, 0]], device=DEVICE)
    ops.copy_pages(kv, pairs[:, 0], pairs[:, 1])
    assert (kv[4] == before[1]).all()
    assert (kv[0] == before[3]).all()
    assert (kv[[1, 2, 3, 5]] == before[[1, 2, 3, 5]]).all()
    # A chain: every source is read before a destination is written.
    expected = kv.clone()
    source, destination = (torch.tensor(s, device=DEVICE) for s in ([8, 9, 47], [9, 10, 16]))
    reference.copy_slots(expected, source, destination)
    ops.copy_slots(kv, source, destination)
    assert (kv == expected).all()
    for copy in (ops.copy_pages, ops.copy_slots):
        copy(kv, source[:0], destination[:0])
    assert (kv == expected).all()


@pytest.mark.parametrize("widths", [(16,), (48, 4096, 3 * 8 * triton_move.BLOCK + 16)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_pages_move_between_pools(widths, count):
    layers = [torch.randint(0, 256, (7, width), dtype=torch.uint8, device=DEVICE) for width in widths]
    # Pages lie further apart than they are long.
    rows = torch.randint(0, 256, (6, sum(widths) + 32), dtype=torch.uint8, device=DEVICE)
    parts = torch.split(rows[:, :-32], list(widths), dim=1)
    expected, before = rows.clone(), [layer.clone() for layer in layers]
    pages, others, places = (torch.randperm(number, device=DEVICE)[:count] for number in (7, 7, 6))
    out, back = ops.prepare_move(layers, parts), ops.prepare_move(parts, layers)
    assert isinstance(out, triton_move.TritonMove)
    out(pages, places)
    expected[places, :-32] = torch.cat([layer[pages] for layer in before], dim=1)
    assert torch.equal(rows, expected)
    assert all(map(torch.equal, layers, before))
    back(places, others)
    for layer, as_it_was, part in zip(layers, before, parts, strict=True):
        as_it_was[others] = part[places]
        assert torch.equal(layer, as_it_was)


def test_pages_move_in_one_launch(monkeypatch):
    class Kernel:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *arguments, **sizes: None

    launched = []
    width = 2 * 8 * triton_move.BLOCK
    layers = [torch.zeros(9, width, dtype=torch.uint8, device=DEVICE) for _ in range(32)]
    parts = torch.split(torch.zeros(9, 32 * width, dtype=torch.uint8, device=DEVICE), width, dim=1)
    monkeypatch.setattr(other_kernels, "move_pages", Kernel())
    ops.prepare_move(layers, parts)(torch.arange(9), torch.arange(9))
    assert launched == [(9, 32, 2)]  # pages, layers, blocks


@pytest.mark.parametrize(("width", "skipped"), [(24, 0), (32, 8)], ids=["width", "address"])
def test_pages_that_are_no_whole_words_go_to_torch(width, skipped):
    pool = torch.arange(160, dtype=torch.uint8, device=DEVICE).view(5, 32)
    source, target = [pool[:, :width]], [torch.zeros(6, 64, dtype=torch.uint8, device=DEVICE)[:, skipped:][:, :width]]
    move = ops.prepare_move(source, target)
    assert not isinstance(move, triton_move.TritonMove)
    move(torch.tensor([3, 1], device=DEVICE), torch.tensor([0, 5], device=DEVICE))
    assert torch.equal(target[0][[0, 5]], source[0][[3, 1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [pytest.param((), id="some"), pytest.param(("--all",), id="all", marks=pytest.mark.soak)]
)
def test_every_kernel_compiles_for_devices(tmp_path, more):
    """The interpreter is more lenient than the compiler, which needs no device for a program that is not run."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", *more],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == {
        name
        for module in (attention_kernels, block_kernels, other_kernels)
        for name, kernel in vars(module).items()
        if not name.startswith("_") and hasattr(kernel, "fn")
    }
    # What a block can have: on devices of capability 9.0, and the least of others from 8.0.
    most = {"90": 227, "80": 99, "86": 99}
    assert all(int(shared) <= most[capability] * 1024 for _, capability, _, shared in lines), done.stdout
