"""Models whose weights are quantized when they are loaded: what is loaded, and what such a model computes."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.runner import Runner, bytes_of_weights
from weft.abi.errors import ModelLoadError
from weft.kernels import dispatch
from weft.kernels.base import Kernels
from weft.kernels.quantize import dequantize, quantize
from weft.models import loader
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny
from weft.models.safetensors_files import SINGLE_FILE

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PANELS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes that packed weights have."""
PROMPTS = [[5, 9, 200, 31, 7], [301], [44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56], [7, 7], [1, 2, 3] * 9]
BATCHES = ([0], [1], [2], [3, 4, 0], [0, 1, 2, 3, 4], [4, 2])


def plain(prefer: str = "reference") -> Kernels:
    return dispatch.select("cpu", torch.bfloat16, prefer={"*": prefer})


def greedy(model, work, steps=12):
    """Tokens that each prompt goes on with, all in one batch, and the logits of each step [steps, prompts, V]."""
    runner = Runner(model)
    sequences = [runner.open(len(prompt) + steps) for prompt in work]
    tokens: list[list[int]] = [[] for _ in work]
    news, kept = [list(prompt) for prompt in work], []
    for _ in range(steps):
        logits = [rows[-1] for rows in runner.run(list(zip(sequences, news, strict=True)))]
        kept.append(torch.stack(logits))
        news = [[int(row.argmax())] for row in logits]
        for row, (token,) in zip(tokens, news, strict=True):
            row.append(token)
    return tokens, torch.stack(kept)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_projections_are_int8_and_nothing_else_is(tmp_path, dtype):
    directory = write_tiny(tmp_path, "qwen2", dtype=torch.float32)
    loaded = load_model(str(directory), dtype=dtype, quantization="int8", kernels=plain())
    wanted = getattr(torch, dtype)
    assert (loaded.spec.quantization, loaded.spec.dtype, loaded.model.kv_spec().dtype) == ("int8", wanted, wanted)
    tensors = load_file(directory / SINGLE_FILE)
    for index in range(3):
        weights = loaded.model.provider.layer(index)
        scaled = {"qkv", "output", "gate_up", "down"}
        assert {name for name, weight in weights.items() if weight.dtype == torch.int8} == scaled
        assert {name for name in weights if name.endswith("_scales")} == {f"{name}_scales" for name in scaled}
        prefix = f"model.layers.{index}.self_attn."
        values, scales = quantize(torch.cat([tensors[f"{prefix}{n}_proj.weight"] for n in "qkv"]))
        assert torch.equal(weights["qkv"], values)
        assert torch.equal(weights["qkv_scales"], scales)
        assert weights["qkv_bias"].dtype == weights["mlp_norm"].dtype == wanted
    shared = loaded.model.provider.shared
    assert {weight.dtype for weight in shared.values()} == {wanted}
    assert loaded.num_bytes == bytes_of_weights(directory, wanted, "int8")
    assert loaded.num_bytes < bytes_of_weights(directory, wanted)


def test_weight_bytes_are_those_of_the_loaded_model(tmp_path):
    directory = write_tiny(tmp_path, tie_word_embeddings=True)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        loaded = load_model(str(directory), dtype=name)  # type: ignore[arg-type]
        assert loaded.num_bytes == bytes_of_weights(directory, dtype)


def test_quantized_some_rows_at_a_time_is_the_same(tmp_path, monkeypatch):
    directory = write_tiny(tmp_path, "qwen3", shards=2)
    whole = load_model(str(directory), quantization="int8", kernels=plain())
    seen = []

    def count(weight):
        seen.append(weight.numel())
        return quantize(weight)

    monkeypatch.setattr(loader, "QUANTIZED_NUMBERS", 500)
    monkeypatch.setattr(loader, "quantize", count)
    again = load_model(str(directory), quantization="int8", kernels=plain())
    assert max(seen) <= 500
    for index in range(3):
        for name, weight in whole.model.provider.layer(index).items():
            assert torch.equal(weight, again.model.provider.layer(index)[name])


def test_a_tensor_without_a_scale_is_refused_by_name(tmp_path):
    directory = write_tiny(tmp_path)
    tensors = load_file(directory / SINGLE_FILE)
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 4] = math.nan
    save_file(tensors, directory / SINGLE_FILE)
    load_model(str(directory))
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(directory), quantization="int8")
    assert name in caught.value.message
    assert "not finite" in caught.value.message


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_model_is_that_of_the_dequantized_checkpoint(tmp_path, family):
    """In float64, where nothing else is rounded: the same logits as a checkpoint that holds what int8 stands for."""
    directory = write_tiny(tmp_path / "given", family, dtype=torch.float64)
    tensors = load_file(directory / SINGLE_FILE)
    for name, tensor in tensors.items():
        if name.endswith(tuple(f"{projection}.weight" for projection in PROJECTIONS)):
            tensors[name] = dequantize(*quantize(tensor), torch.float64)
    twin = write_tiny(tmp_path / "twin", family, dtype=torch.float64)
    save_file(tensors, twin / SINGLE_FILE)
    expected, expected_logits = greedy(load_model(str(twin)).model, PROMPTS)
    _, unquantized_logits = greedy(load_model(str(directory)).model, PROMPTS)
    assert (unquantized_logits - expected_logits).abs().max() > 1e-3  # quantization can be seen
    for kernels in (None, plain(), plain("torch")):
        model = load_model(str(directory), quantization="int8", kernels=kernels).model
        tokens, logits = greedy(model, PROMPTS)
        assert tokens == expected
        torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_logits_in_bfloat16_are_near_those_of_the_reference(tmp_path, quantization):
    directory = write_tiny(tmp_path, **PANELS, dtype=torch.bfloat16)
    options = {"dtype": "bfloat16", "quantization": quantization}
    reference = Runner(load_model(str(directory), kernels=plain(), **options).model)
    chosen = Runner(load_model(str(directory), **options).model)
    for prompt in PROMPTS:
        (expected,) = reference.run([(reference.open(64), prompt)])
        (got,) = chosen.run([(chosen.open(64), prompt)])
        assert ((got - expected).abs() <= 0.05 * expected.abs().max()).all()


PACKED = dispatch.int8_note("cpu", torch.bfloat16) == "int8: C++, packed"


@pytest.mark.skipif(not PACKED, reason="without packed int8 weights, a row's bits may depend on its batch")
def test_in_bfloat16_a_sequence_gets_the_same_in_any_batch(tmp_path):
    directory = write_tiny(tmp_path, **PANELS, dtype=torch.bfloat16)
    model = load_model(str(directory), dtype="bfloat16", quantization="int8").model
    assert model.provider.layer(0)["qkv"].dim() == 4
    alone = [greedy(model, [prompt]) for prompt in PROMPTS]
    for batch in BATCHES:
        tokens, logits = greedy(model, [PROMPTS[i] for i in batch])
        assert tokens == [alone[i][0][0] for i in batch]
        for column, i in enumerate(batch):
            assert torch.equal(logits[:, column], alone[i][1][:, 0])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_as_one_is_its_two_halves(tmp_path, dtype, quantization):
    directory = write_tiny(tmp_path, "qwen2", **PANELS)
    model = load_model(str(directory), dtype=dtype, quantization=quantization).model
    whole, _ = greedy(model, PROMPTS)

    class Halves:
        def __init__(self, layer):
            self.layer = layer

        def forward(self, x, weights, batch, kv):
            return self.layer.feed_forward(self.layer.attend(x, weights, batch, kv), weights)

    model._layers = [Halves(layer) for layer in model.layers]
    halves, _ = greedy(model, PROMPTS)
    assert halves == whole
