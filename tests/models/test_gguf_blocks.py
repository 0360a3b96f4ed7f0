"""GGUF files whose matrices stay in quantized blocks: what is loaded, and what such a model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gguf.writing import all_of, write_gguf
from tests.models.any_batch import check_any_batch
from tests.models.runner import PROMPTS, Runner, all_weights, bytes_of_weights, greedy, plain
from tests.models.test_gguf import LARGE, mixed
from weft.kernels import dispatch
from weft.kernels.block_weights import BlockPart, BlockWeight, expand_rows
from weft.kernels.cpu import library, ops
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny

pytestmark = pytest.mark.skipif(
    not dispatch.block_types("cpu", torch.float32), reason="without the library in C++ all blocks are expanded"
)
KINDS = {"Q8_0": all_of("Q8_0"), "Q4_0": all_of("Q4_0"), "Q5_0": all_of("Q5_0"), "mixed": mixed}
kinds = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def file_of(folder: Path, kinds: Callable[[str], str], family: str = "qwen2", **options: object) -> Path:
    directory = write_tiny(folder / "model", family, seed=4, **{**LARGE, **options})
    return write_gguf(folder / "m.gguf", directory, kinds)


def matrix_of(weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, BlockWeight):
        return weight
    parts = zip(weight.parts, weight.data_of_parts(), strict=True)
    return torch.cat([expand_rows(data, part, weight.inputs) for part, data in parts])


@kinds
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_are_those_of_the_file(kinds: Callable[[str], str], family: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, kinds, family)
    kept = load_model(str(path), dtype="float32", kernels=plain())
    expanded = load_model(str(path), dtype="float32", kernels=plain(), quantized_blocks="expand")
    weights, expected = all_weights(kept.model), all_weights(expanded.model)
    assert {name for name, weight in weights.items() if isinstance(weight, BlockWeight)} == {
        name for name, weight in expected.items() if weight.dim() == 2
    }
    for name, weight in weights.items():
        assert torch.equal(matrix_of(weight), expected[name]), name
    if kinds is mixed:
        assert weights["0.qkv"].parts == (BlockPart("Q4_K", 384), BlockPart("Q5_K", 128))
    assert expanded.spec.block_types == ()


@kinds
@dtypes
def test_weights_are_packed_and_memory_is_that_of_the_file(
    kinds: Callable[[str], str], dtype: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, kinds)
    loaded = load_model(str(path), dtype=dtype)
    weights = all_weights(loaded.model)
    assert all(weight.packed for weight in weights.values() if isinstance(weight, BlockWeight))
    assert loaded.num_bytes == sum(weight.nbytes for weight in weights.values())
    assert loaded.num_bytes == bytes_of_weights(path, getattr(torch, dtype))
    growth = 34 / 22 if kinds is KINDS["Q5_0"] else 1.0  # it takes the blocks of Q8_0
    assert loaded.num_bytes < 1.03 * growth * path.stat().st_size
    assert loaded.model.kv_spec().dtype == loaded.spec.dtype == getattr(torch, dtype)
    assert loaded.notice is not None
    assert "stay in blocks, which activations meet in 8 bits" in loaded.notice
    assert ("Q5_0 (as Q8_0) stay" in loaded.notice) == (kinds is KINDS["Q5_0"])


@kinds
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_reference(
    kinds: Callable[[str], str], family: str, tied: bool, tmp_path: Path
) -> None:
    """Sums in another order round some activations to the other neighbour, and the next layers more of them: up to the
    size of what rounding does at all."""
    path = file_of(tmp_path, kinds, family, tie_word_embeddings=tied)
    text = torch.randint(320, (50,), generator=torch.Generator().manual_seed(7)).tolist()
    found = []
    for options in ({}, {"kernels": plain("reference")}, {"quantized_blocks": "expand"}):
        runner = Runner(load_model(str(path), dtype="float32", **options).model)
        found.append(runner.run([(runner.open(64), text)])[0])
    got, expected, exact = found
    error = (got - expected).square().mean().sqrt() / expected.std()
    rounding = (exact - expected).square().mean().sqrt() / expected.std()
    assert rounding > 0.005  # that of activations can be seen
    assert error < 0.8 * rounding


LEVELS = [] if isinstance(ops.best(), Exception) else library.levels(library.load())


@kinds
@dtypes
@pytest.mark.parametrize("level", LEVELS, ids=[level.name.lower() for level in LEVELS])
def test_a_sequence_gets_the_same_in_any_batch(
    kinds: Callable[[str], str], dtype: str, level: library.Level, tmp_path: Path
) -> None:
    path = file_of(tmp_path, kinds)
    loaded = library.load()
    kernels = ops.CpuKernels(loaded, level, vnni=library.has_vnni(loaded, level))
    model = load_model(str(path), dtype=dtype, kernels=kernels.gather()).model  # type: ignore[arg-type]
    check_any_batch(model, kernels, dtype)


@kinds
@dtypes
def test_a_block_as_one_is_its_two_halves(kinds: Callable[[str], str], dtype: str, tmp_path: Path) -> None:
    model = load_model(str(file_of(tmp_path, kinds)), dtype=dtype).model  # type: ignore[arg-type]
    assert model.layers[0]._block(model.provider.layer(0)) is not None
    _, whole = greedy(model, PROMPTS, steps=4)

    class Halves:
        def __init__(self, layer):
            self.layer = layer

        def forward(self, x, weights, batch, kv):
            return self.layer.feed_forward(self.layer.attend(x, weights, batch, kv), weights)

    model._layers = [Halves(layer) for layer in model.layers]
    _, halves = greedy(model, PROMPTS, steps=4)
    assert torch.equal(halves, whole)


def test_what_is_expanded_all_the_same(tmp_path: Path) -> None:
    path = file_of(tmp_path, all_of("Q8_0"))
    for options, why in (
        ({"dtype": "float64"}, "expanded to float64, as no kernel"),
        ({"dtype": "float16"}, "expanded to float16, as no kernel"),
        ({"dtype": "bfloat16", "quantized_blocks": "expand"}, "expanded to bfloat16, as the settings ask for"),
    ):
        loaded = load_model(str(path), **options)
        assert not any(isinstance(weight, BlockWeight) for weight in all_weights(loaded.model).values())
        assert loaded.notice is not None
        assert loaded.notice.startswith(f"Q8_0 {why}")


def test_blocks_that_are_quantized_again(tmp_path: Path) -> None:
    """Of 8 bits to 8 bits: the same, but for the embedding and the head."""
    path = file_of(tmp_path, all_of("Q8_0"))
    kept = load_model(str(path), dtype="float32", kernels=plain())
    again = load_model(str(path), dtype="float32", kernels=plain(), quantization="int8")
    assert str(again.notice).startswith("Q8_0 expanded to int8 and float32, as the settings ask for")
    weights = all_weights(again.model)
    assert {name for name, weight in weights.items() if isinstance(weight, BlockWeight)} == {
        f"{layer}.{name}" for layer in range(2) for name in ("qkv", "output", "gate_up", "down")
    }
    for name, weight in all_weights(kept.model).items():
        assert torch.equal(matrix_of(weight), matrix_of(weights[name])), name


def test_types_without_kernels_are_named(tmp_path: Path) -> None:
    for others, why in (
        ("Q4_1", "Q4_1 expanded to bfloat16, as no kernel computes on such blocks"),
        ("Q8_0", "Q4_1 expanded to bfloat16, as no kernel computes on such blocks; Q8_0 expanded to bfloat16, where"),
    ):
        path = file_of(tmp_path, lambda name, others=others: all_of("Q4_1" if "up_proj" in name else others)(name))
        assert why in str(load_model(str(path), dtype="bfloat16").notice)


def test_shapes_and_mixtures_that_no_kernel_takes(tmp_path: Path) -> None:
    """Queries, keys and values that are 144 rows together, and a matrix that is partly floats."""

    def kinds(name: str) -> str:
        return "BF16" if "up_proj" in name else all_of("Q8_0")(name)

    path = file_of(tmp_path, kinds, head_dim=24, num_key_value_heads=1)
    loaded = load_model(str(path), dtype="float32")
    in_blocks = {name for name, w in loaded.model.provider.layer(0).items() if isinstance(w, BlockWeight)}
    assert in_blocks == {"output", "down"}
    assert loaded.notice is not None
    assert loaded.notice.startswith("Q8_0 stay in blocks, which activations meet in 8 bits; Q8_0 expanded to")
    assert "where shapes or mixtures do not fit the kernels" in loaded.notice
    assert loaded.num_bytes == sum(weight.nbytes for weight in all_weights(loaded.model).values())
