"""Products with weights in quantized blocks in Triton: on a CUDA device where there is one, else in the interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.gguf.writing import write_gguf
from tests.kernels.blocks import random_block_weight
from tests.models.runner import Runner
from tests.models.test_gguf import LARGE, mixed
from weft.kernels import dispatch, reference, torch_ops
from weft.kernels.block_weights import BLOCK_TYPES, BlockWeight, take_block_rows
from weft.kernels.triton import support
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny

pytest.importorskip("triton")
from weft.kernels.triton import block_layout, blocks, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1 and there is no CUDA device", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest difference from sums in float64, relative to the largest value: that of rounding the result."""
kinds = pytest.mark.parametrize("kind", BLOCK_TYPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])


@pytest.fixture(autouse=True)
def _nothing_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("left to the reference")

    monkeypatch.setattr(reference, "block_product", refuse)
    monkeypatch.setattr(reference, "take_block_rows", refuse)


def inputs_of(kind: str) -> int:
    """An odd number of half steps where a type allows it."""
    return 512 if kind.endswith("_K") else 256 if kind == "INT4_G128" else 96


def packed(parts: list[tuple[str, int]], inputs: int) -> tuple[BlockWeight, torch.Tensor]:
    """A random weight packed on the device, and what it stands for, float32 on the CPU."""
    weight = random_block_weight(parts, inputs)
    there = BlockWeight.of(weight.data.to(DEVICE), weight.parts, inputs)
    return ops.pack_weight(there), take_block_rows(weight, torch.arange(weight.outputs))


def assert_is_product(got: torch.Tensor, x: torch.Tensor, full: torch.Tensor, *added: torch.Tensor) -> None:
    expected = x.double() @ full.double().T + sum(term.double() for term in added)
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    assert (got.cpu() - expected).abs().max() <= BOUNDS[x.dtype] * expected.abs().max()


@kinds
@dtypes
@pytest.mark.parametrize("rows", [1, 5, 33, 70], ids=lambda rows: f"{rows}_rows")
def test_a_product(kind: str, dtype: torch.dtype, rows: int) -> None:
    """Of 70 rows with floats that are made of the weight, of fewer with the weight as it is."""
    inputs = inputs_of(kind)
    weight, full = packed([(kind, 96)], inputs)
    generator = torch.Generator().manual_seed(1)
    x, bias, residual = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, inputs), (96,), (rows, 96))
    )
    there = x.to(DEVICE)
    assert_is_product(ops.linear(there, weight), x, full)
    assert_is_product(ops.linear(there, weight, bias.to(DEVICE), residual.clone().to(DEVICE)), x, full, bias, residual)
    assert torch.equal(there.cpu(), x)


@kinds
def test_what_a_weight_stands_for_is_exact(kind: str) -> None:
    weight, full = packed([(kind, 96)], inputs_of(kind))
    assert torch.equal(blocks.expanded(weight, 0, 96, torch.float32).cpu(), full)
    assert torch.equal(blocks.expanded(weight, 32, 64, torch.float16).cpu(), full[32:64].half())
    rows = torch.tensor([95, 0, 31, 32, 32, 70])
    assert torch.equal(ops.take_rows(weight, rows.to(DEVICE), torch.float32).cpu(), full[rows])
    assert torch.equal(ops.take_rows(weight, rows.int().to(DEVICE), torch.float16).cpu(), full[rows].half())


@pytest.mark.parametrize("rows", [3, 65], ids=["as_it_is", "as_floats"])
def test_parts_of_several_types_packed_and_expanded_a_few_outputs_at_a_time(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "EXPANDED_NUMBERS", 64 * 512)
    monkeypatch.setattr(block_layout, "PACKED_NUMBERS", 64 * 512)
    weight, full = packed([("Q4_K", 96), ("Q6_K", 32), ("Q8_0", 64)], 512)
    x, bias, residual = torch.randn(rows, 512), torch.randn(192), torch.randn(rows, 192)
    there = [tensor.clone().to(DEVICE) for tensor in (x, bias, residual)]
    assert_is_product(ops.linear(there[0], weight, *there[1:]), x, full, bias, residual)
    indices = torch.tensor([0, 95, 96, 127, 128, 191])
    assert torch.equal(ops.take_rows(weight, indices.to(DEVICE)).cpu(), full[indices])


@pytest.mark.parametrize("rows", [1, 16, 20, 64], ids=lambda rows: f"{rows}_rows")
def test_tiles_for_many_inputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONG_INPUTS", 1)
    weight, full = packed([("INT4_G128", 32), ("Q8_0", 32)], 1280)
    x = torch.randn(rows, 1280).bfloat16()
    assert_is_product(ops.linear(x.to(DEVICE), weight), x, full)


def test_no_row_and_rows_that_are_apart() -> None:
    weight, full = packed([("Q4_0", 32)], 64)
    assert ops.linear(torch.empty(0, 64, device=DEVICE), weight).shape == (0, 32)
    x = torch.randn(6, 64)
    assert_is_product(ops.linear(x.to(DEVICE)[::2], weight), x[::2], full)


def test_it_takes_the_memory_of_a_packed_weight_and_the_planes_are_in_it() -> None:
    for kind in BLOCK_TYPES:
        weight, _ = packed([(kind, 64)], inputs_of(kind))
        [planes] = weight.planes
        first = weight.data_ptr()
        places = sorted((plane.data_ptr() - first, plane.nbytes) for plane in planes.stored if plane.numel())
        assert [place for place, _ in places] == [sum(size for _, size in places[:i]) for i in range(len(places))]
        assert sum(size for _, size in places) == weight.nbytes
    assert set(block_layout.LAYOUTS) == set(BLOCK_TYPES)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/test_devices.py has the same with a whole engine")
def test_a_model_in_blocks_gives_the_logits_of_the_expanded_one(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_tiny(tmp_path / "model", "qwen2", seed=4, **LARGE), mixed)
    kept = load_model(str(path), dtype="float32", kernels=ops.KERNELS)
    expanded = load_model(str(path), dtype="float32", kernels=torch_ops.KERNELS, quantized_blocks="expand")
    assert kept.spec.block_types == ("Q4_K", "Q5_K", "Q6_K")
    assert expanded.spec.block_types == ()
    found = []
    for loaded in (kept, expanded):
        runner = Runner(loaded.model)
        found.append(runner.run([(runner.open(8), [5, 9, 3, 77, 40, 41, 7]), (runner.open(8), [8])]))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_devices_with_the_kernels_keep_all_types_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "missing", lambda device, dtype: None)
    assert dispatch.block_types("cuda", torch.float16) == set(BLOCK_TYPES)
    assert not dispatch.rounds_activations("cuda")
    monkeypatch.setattr(support, "missing", lambda device, dtype: "not installed")
    assert dispatch.block_types("cuda", torch.float16) == frozenset()
