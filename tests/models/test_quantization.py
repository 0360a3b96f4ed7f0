"""Models whose weights are quantized when they are loaded: what is loaded, and what such a model computes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.any_batch import best_kernels, check_any_batch
from tests.models.runner import PROMPTS, Runner, all_weights, bytes_of_weights, greedy, plain, with_kernels
from tests.models.test_gguf import LARGE
from weft.abi.errors import ModelLoadError, Unsupported
from weft.config import Quantization
from weft.kernels.block_weights import BlockWeight
from weft.kernels.quantize import quantize
from weft.models import loader
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny
from weft.models.safetensors_files import SINGLE_FILE

KINDS = {
    "int8": {"qkv": "Q8_0", "output": "Q8_0", "gate_up": "Q8_0", "down": "Q8_0"},
    "int4": {"qkv": "Q4_K", "output": "Q4_K", "gate_up": "Q4_K", "down": "Q4_0"},
}
"""Types of blocks of a layer whose feed-forward part has 544 inputs."""
BYTES = {"int8": 0.54, "int4": 0.3}
"""Of a layer, compared with bfloat16, at most."""

quantizations = pytest.mark.parametrize("quantization", ["int8", "int4"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def test_weight_bytes_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, tie_word_embeddings=True)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        loaded = load_model(str(directory), dtype=name)  # type: ignore[arg-type]
        assert loaded.num_bytes == bytes_of_weights(directory, dtype)


@with_kernels
@quantizations
def test_projections_are_quantized_and_nothing_else_is(quantization: Quantization, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "qwen2", **{**LARGE, "intermediate_size": 544}, dtype=torch.bfloat16)
    kept = load_model(str(directory), dtype="bfloat16", kernels=plain()).model
    loaded = load_model(str(directory), dtype="bfloat16", quantization=quantization, kernels=plain())
    assert (loaded.spec.quantization, loaded.notice) == (quantization, None)
    assert loaded.model.kv_spec().dtype == torch.bfloat16
    assert {weight.dtype for weight in loaded.model.provider.shared.values()} == {torch.bfloat16}
    for index in range(2):
        weights, whole = loaded.model.provider.layer(index), kept.provider.layer(index)
        kinds = {name: w.parts[0].kind for name, w in weights.items() if isinstance(w, BlockWeight)}
        assert kinds == KINDS[quantization]
        for name, kind in kinds.items():
            assert torch.equal(weights[name].as_subclass(torch.Tensor), quantize(whole[name], kind).flatten())
        assert weights["qkv_bias"].dtype == weights["mlp_norm"].dtype == torch.bfloat16
    assert loaded.num_bytes == bytes_of_weights(directory, torch.bfloat16, quantization)
    layers = loaded.num_bytes - sum(weight.nbytes for weight in loaded.model.provider.shared.values())
    whole_bytes = sum(weight.nbytes for i in range(2) for weight in kept.provider.layer(i).values())
    assert layers < BYTES[quantization] * whole_bytes


@with_kernels
@quantizations
def test_quantized_some_rows_at_a_time_is_the_same(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny(tmp_path, "qwen3", **LARGE, shards=2)
    whole = all_weights(load_model(str(directory), quantization=quantization).model)
    seen: list[int] = []

    def count(weight: torch.Tensor, kind: str) -> torch.Tensor:
        seen.append(weight.numel())
        return quantize(weight, kind)

    monkeypatch.setattr(loader, "QUANTIZED_NUMBERS", 3000)
    monkeypatch.setattr(loader, "quantize", count)
    again = all_weights(load_model(str(directory), quantization=quantization).model)
    assert max(seen) <= 3000
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


@with_kernels
@quantizations
@dtypes
def test_logits_are_near_those_of_the_reference(quantization: Quantization, dtype: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "llama", **LARGE)
    options = {"dtype": dtype, "quantization": quantization}
    reference = Runner(load_model(str(directory), kernels=plain(), **options).model)  # type: ignore[arg-type]
    chosen = Runner(load_model(str(directory), **options).model)  # type: ignore[arg-type]
    for prompt in PROMPTS:
        (expected,) = reference.run([(reference.open(64), prompt)])
        (got,) = chosen.run([(chosen.open(64), prompt)])
        assert ((got - expected).abs() <= 0.05 * expected.abs().max()).all()


@with_kernels
@quantizations
@dtypes
def test_a_sequence_gets_the_same_in_any_batch(quantization: Quantization, dtype: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "qwen3", **LARGE)
    model = load_model(str(directory), dtype=dtype, quantization=quantization).model  # type: ignore[arg-type]
    check_any_batch(model, best_kernels(), dtype)


@with_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@dtypes
def test_a_block_as_one_is_its_two_halves(quantization: Quantization | None, dtype: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "qwen2", **LARGE)
    model = load_model(str(directory), dtype=dtype, quantization=quantization).model  # type: ignore[arg-type]
    whole, _ = greedy(model, PROMPTS)

    class Halves:
        def __init__(self, layer):
            self.layer = layer

        def forward(self, x, weights, batch, kv):
            return self.layer.feed_forward(self.layer.attend(x, weights, batch, kv), weights)

    model._layers = [Halves(layer) for layer in model.layers]
    halves, _ = greedy(model, PROMPTS)
    assert halves == whole


@quantizations
def test_a_quantization_that_no_kernel_takes_is_refused(quantization: Quantization, tmp_path: Path) -> None:
    large = write_tiny(tmp_path / "large", **LARGE)
    for dtype in ("float64", "float16"):
        words = rf"{quantization} needs the kernels in C\+\+ on a CPU.* the dtype {dtype}"
        with pytest.raises(Unsupported, match=words):
            load_model(str(large), dtype=dtype, quantization=quantization)  # type: ignore[arg-type]


@with_kernels
@quantizations
def test_what_cannot_be_quantized_is_refused_by_name(quantization: Quantization, tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small")
    with pytest.raises(Unsupported, match=r"self_attn.q_proj.weight, .* are 80 outputs of 48 inputs together"):
        load_model(str(small), quantization=quantization)
    directory = write_tiny(tmp_path / "large", **LARGE)
    tensors = load_file(directory / SINGLE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = math.nan
    save_file(tensors, directory / SINGLE_FILE)
    load_model(str(directory))
    with pytest.raises(ModelLoadError, match=rf"{name} cannot be quantized: .* not finite"):
        load_model(str(directory), quantization=quantization)
