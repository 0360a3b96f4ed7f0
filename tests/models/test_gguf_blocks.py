"""GGUF files whose matrices stay in quantized blocks: what is loaded, and what such a model computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gguf.writing import all_of, write_gguf
from tests.models.any_batch import best_kernels, check_any_batch
from tests.models.runner import Runner, bytes_of_weights
from tests.models.test_gguf import LARGE, mixed
from tests.models.test_quantization import PROMPTS, greedy, plain
from weft.abi.errors import ModelLoadError, Unsupported
from weft.kernels import dispatch
from weft.kernels.block_weights import BlockPart, BlockWeight, expand_rows
from weft.kernels.cpu import library, ops
from weft.kernels.quantize_int4 import quantize_int4
from weft.models import loader
from weft.models.base import LanguageModel
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny
from weft.models.safetensors_files import SINGLE_FILE

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


def all_weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    provider = model.provider
    layers = {f"{i}.{name}": weight for i in range(2) for name, weight in provider.layer(i).items()}
    return {**provider.shared, **layers}


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
        ({"dtype": "bfloat16", "quantization": "int8"}, "expanded to int8 and bfloat16, as the settings ask for"),
    ):
        loaded = load_model(str(path), **options)
        assert not any(isinstance(weight, BlockWeight) for weight in all_weights(loaded.model).values())
        assert loaded.notice is not None
        assert loaded.notice.startswith(f"Q8_0 {why}")


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


# Quantized to 4 bits when they are loaded


def test_int4_is_blocks_of_the_projections(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "qwen2", **{**LARGE, "intermediate_size": 544}, dtype=torch.bfloat16)
    kept = load_model(str(directory), dtype="bfloat16", kernels=plain("reference")).model
    loaded = load_model(str(directory), dtype="bfloat16", quantization="int4", kernels=plain("reference"))
    assert (loaded.spec.quantization, loaded.notice) == ("int4", None)
    assert not any(isinstance(weight, BlockWeight) for weight in loaded.model.provider.shared.values())
    for index in range(2):
        weights, whole = loaded.model.provider.layer(index), kept.provider.layer(index)
        kinds = {name: w.parts[0].kind for name, w in weights.items() if isinstance(w, BlockWeight)}
        assert kinds == {"qkv": "Q4_K", "output": "Q4_K", "gate_up": "Q4_K", "down": "Q4_0"}
        for name in kinds:
            expected = quantize_int4(whole[name])
            assert torch.equal(weights[name].as_subclass(torch.Tensor), expected.flatten())
    assert loaded.num_bytes == bytes_of_weights(directory, torch.bfloat16, "int4")
    layers = loaded.num_bytes - sum(weight.nbytes for weight in loaded.model.provider.shared.values())
    assert layers < 0.3 * sum(weight.nbytes for i in range(2) for weight in kept.provider.layer(i).values())


def test_int4_some_rows_at_a_time_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny(tmp_path, "qwen3", **LARGE, shards=2)
    whole = all_weights(load_model(str(directory), quantization="int4").model)
    monkeypatch.setattr(loader, "QUANTIZED_NUMBERS", 3000)
    again = all_weights(load_model(str(directory), quantization="int4").model)
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


@dtypes
def test_int4_gets_the_same_in_any_batch(dtype: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "qwen3", **LARGE)
    model = load_model(str(directory), dtype=dtype, quantization="int4").model  # type: ignore[arg-type]
    check_any_batch(model, best_kernels(), dtype)


def test_int4_is_refused_where_no_kernel_takes_it(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "large", **LARGE)
    with pytest.raises(Unsupported, match=r"int4 needs the kernels in C\+\+ on a CPU.* the dtype float64"):
        load_model(str(directory), dtype="float64", quantization="int4")
    small = write_tiny(tmp_path / "small")
    with pytest.raises(Unsupported, match=r"self_attn.q_proj.weight, .* are 80 outputs of 48 inputs together"):
        load_model(str(small), quantization="int4")
    tensors = load_file(directory / SINGLE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = math.nan
    save_file(tensors, directory / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=rf"{name} cannot be quantized: .* not finite"):
        load_model(str(directory), quantization="int4")
