"""Safetensors checkpoints of 4 bits whose matrices stay in 4 bits: what is loaded, and what such a model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.any_batch import best_kernels, check_any_batch
from tests.models.quantized_writing import CASES, write_quantized
from tests.models.runner import Runner, all_weights, bytes_of_weights, plain
from tests.models.test_gguf_blocks import matrix_of
from weft.kernels import dispatch
from weft.kernels.block_weights import BlockWeight
from weft.kernels.quantized_blocks import expand
from weft.models.loader import load_model, open_checkpoint
from weft.models.quantized import expand as expanding

pytestmark = pytest.mark.skipif(
    not dispatch.block_types("cpu", torch.float32), reason="without the library in C++ all blocks are expanded"
)
KINDS = {
    "gptq": "INT4_G128",
    "gptq-32-asymmetric": "INT4_G32",
    "gptq-v2": "INT4_G32",
    "awq": "INT4_G128",
    "awq-32": "INT4_G32",
    "awq-row": "INT4_G128",
    "pack-4-bits": "INT4_G32",
    "pack-4-bits-asymmetric": "INT4_G32",
}
cases = pytest.mark.parametrize("name", KINDS)


def packed_and_plain(name: str, folder: Path, family: str = "qwen2", **sizes: int) -> tuple[Path, Path]:
    return write_quantized(folder, *CASES[name][:2], family, **sizes)


@pytest.mark.parametrize("name", CASES)
def test_matrices_of_four_bits_in_order_become_blocks(name: str, tmp_path: Path, monkeypatch) -> None:
    packed, _ = packed_and_plain(name, tmp_path)
    monkeypatch.setattr(expanding, "PIECE_NUMBERS", 3000)
    checkpoint = open_checkpoint(packed)
    matrices = {tensor: info for tensor, info in checkpoint.tensors().items() if info.numbers_in is not None}
    assert matrices
    for tensor, info in matrices.items():
        assert info.blocks == KINDS.get(name)
        meant = torch.cat([piece.values for piece in checkpoint.pieces([tensor])])
        pieces = list(checkpoint.pieces([tensor], [tensor]))
        assert [piece.first for piece in pieces] == sorted({piece.first for piece in pieces})
        stored = torch.cat([piece.values for piece in pieces])
        if info.blocks is None:
            assert torch.equal(stored, meant)  # a matrix without a type of blocks is expanded
            continue
        count = info.shape[1] // (128 if info.blocks == "INT4_G128" else 32)
        found = expand(info.blocks, stored.view(info.shape[0] * count, -1))
        assert torch.equal(found.view(info.shape), meant), tensor


@cases
def test_a_model_keeps_four_bits(name: str, tmp_path: Path) -> None:
    packed, dense = packed_and_plain(name, tmp_path)
    kept = load_model(str(packed), dtype="float32", kernels=plain())
    weights, expected = all_weights(kept.model), all_weights(load_model(str(dense), dtype="float32").model)
    in_blocks = {key for key, weight in weights.items() if isinstance(weight, BlockWeight)}
    assert in_blocks == {f"{layer}.{key}" for layer in (0, 1) for key in ("qkv", "output", "gate_up", "down")}
    assert kept.spec.block_types == (KINDS[name],)
    for key in in_blocks:
        assert weights[key].numel() <= 0.75 * expected[key].numel()
        assert weights[key].parts[0].kind == KINDS[name]
    exact = load_model(str(packed), dtype="float32", kernels=plain(), quantized_blocks="expand")
    for key, weight in all_weights(exact.model).items():
        assert torch.equal(matrix_of(weights[key]), weight), key


@cases
def test_memory_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    packed, _ = packed_and_plain(name, tmp_path)
    loaded = load_model(str(packed), dtype="bfloat16")
    weights = all_weights(loaded.model)
    assert all(weight.packed for weight in weights.values() if isinstance(weight, BlockWeight))
    assert loaded.num_bytes == sum(weight.nbytes for weight in weights.values())
    assert loaded.num_bytes == bytes_of_weights(packed, torch.bfloat16)
    kind = CASES[name][2]
    [blocks] = {part.kind for weight in weights.values() if isinstance(weight, BlockWeight) for part in weight.parts}
    assert str(loaded.notice).startswith(f"{kind} (as {blocks}) stay in blocks, which activations meet in 8 bits: ")
    expanded = load_model(str(packed), dtype="bfloat16", quantized_blocks="expand")
    assert str(expanded.notice).startswith(f"{kind} expanded to bfloat16, as the settings ask for: ")
    again = load_model(str(packed), dtype="bfloat16", quantization="int8")
    assert again.spec.block_types == ()


@cases
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_the_reference(name: str, family: str, tmp_path: Path) -> None:
    """As for GGUF: sums in another order round some activations to the other neighbour."""
    packed, _ = packed_and_plain(name, tmp_path, family)
    text = torch.randint(320, (50,), generator=torch.Generator().manual_seed(7)).tolist()
    found = []
    for options in ({}, {"kernels": plain("reference")}, {"quantized_blocks": "expand"}):
        runner = Runner(load_model(str(packed), dtype="float32", **options).model)
        found.append(runner.run([(runner.open(64), text)])[0])
    got, expected, exact = found
    error = (got - expected).square().mean().sqrt() / expected.std()
    rounding = (exact - expected).square().mean().sqrt() / expected.std()
    assert rounding > 0.003
    assert error < 0.8 * rounding


def test_a_sequence_gets_the_same_in_any_batch(tmp_path: Path) -> None:
    packed, _ = packed_and_plain("awq", tmp_path)
    model = load_model(str(packed), dtype="bfloat16").model
    check_any_batch(model, best_kernels(), "bfloat16")


def test_shapes_that_kernels_do_not_take_are_expanded(tmp_path: Path) -> None:
    packed, _ = packed_and_plain("gptq-32-asymmetric", tmp_path, intermediate_size=112)
    loaded = load_model(str(packed), dtype="float32")
    weights = all_weights(loaded.model)
    assert isinstance(weights["0.qkv"], BlockWeight)
    assert not isinstance(weights["0.down"], BlockWeight)
    assert "GPTQ int4 expanded to float32, as no kernel computes on such matrices; " in str(loaded.notice)
    assert "GPTQ int4 (as INT4_G32) stay in blocks" in str(loaded.notice)
