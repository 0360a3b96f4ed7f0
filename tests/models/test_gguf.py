"""GGUF files give the logits of the same weights in safetensors, and bad ones are refused by what is wrong."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gguf.forging import F32, U32, entry, forge, texts, u32
from tests.gguf.writing import all_of, write_gguf
from tests.models.runner import Runner, bytes_of_weights
from weft.abi.errors import ConfigError, ModelLoadError, Unsupported
from weft.gguf.file import read_gguf
from weft.gguf.types import TYPE_NAMES
from weft.kernels import dispatch
from weft.models import gguf_checkpoint
from weft.models.loader import load_model, open_checkpoint
from weft.models.random_checkpoints import write_tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BIASES = {"attention_bias": True, "mlp_bias": True}
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
"""Rows of whole blocks of 256."""


def logits(model: str | Path, **options) -> torch.Tensor:
    text = torch.randint(320, (50,), generator=torch.Generator().manual_seed(7)).tolist()
    runner = Runner(load_model(str(model), **options).model)
    return runner.run([(runner.open(64), text)])[0]


def refused(path: Path, *words: str, error: type[Exception] = ModelLoadError, **options) -> None:
    with pytest.raises(error) as caught:
        load_model(str(path), **options)
    for word in words:
        assert word in str(caught.value)


CASES = {
    "llama": ("llama", {}, {}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}, {}),
    "llama-biases": ("llama", BIASES, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-linear": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
    ),
    "llama-linear-old": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}, {"rope.scale_linear": 2.5}),
    "llama-linear-without-a-type": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope.scaling.factor": 2.5, "rope.scale_linear": 4.0},
    ),
    "llama-factor-of-no-scaling": ("llama", {}, {"rope.scaling.factor": 0.0}),
    "llama-scaling-of-none": ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "mistral": ("mistral", {}, {}),
    "mistral-window": ("mistral", {"sliding_window": 11}, {"attention.sliding_window": 11}),
    "mistral-window-of-the-context": ("mistral", {}, {"attention.sliding_window": 512}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-window-of-the-context": ("qwen2", {}, {"attention.sliding_window": 512}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_scaling": YARN, "max_position_embeddings": 128},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3": ("qwen3", {}, {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3-kv-per-layer": ("qwen3", {}, {"attention.head_count_kv": [2, 2, 2]}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_family_and_option_is_that_of_safetensors(name: str, tmp_path: Path) -> None:
    family, options, metadata = CASES[name]
    directory = write_tiny(tmp_path / "model", family, seed=3, **options)
    path = write_gguf(tmp_path / "m.gguf", directory, **metadata)
    assert torch.equal(logits(path), logits(directory))
    assert open_checkpoint(path).spec.max_position == open_checkpoint(directory).spec.max_position
    loaded = load_model(str(path))
    assert (loaded.path, loaded.notice) == (path, None)
    assert loaded.num_bytes == bytes_of_weights(path, torch.float32) == load_model(str(directory)).num_bytes


def test_rope_factors_are_llama_3s(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model", rope_scaling=LLAMA3, rope_theta=500000.0)
    bases = 500000.0 ** (np.arange(0, 8, 2) / 8)
    factors = []
    for wavelength in 2 * math.pi * bases:
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 / ((1 - np.clip(smooth, 0, 1)) / 8 + np.clip(smooth, 0, 1)))
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", directory, tensors=tensors)
    assert (logits(path) - logits(directory)).abs().max() < 1e-5
    plain = write_gguf(tmp_path / "plain.gguf", directory)
    assert (logits(plain) - logits(directory)).abs().max() > 1e-2
    for bad in (factors[:3], [*factors[:3], 0.0], [*factors[:3], math.nan], [*factors[:3], math.inf]):
        tensors["rope_freqs.weight"] = np.array(bad, np.float32)
        refused(write_gguf(tmp_path / "bad.gguf", directory, tensors=tensors), "'rope_freqs.weight' at byte")


def test_split_files(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model", "qwen3")
    write_gguf(tmp_path / "m.gguf", directory, split=10)
    first = sorted(tmp_path.glob("m-*.gguf"))[0]
    assert len(read_gguf(first).tensors) > 10
    assert torch.equal(logits(first), logits(directory))


def mixed(name: str) -> str:
    """As in files of the quantization Q4_K_M: some matrices with more bits."""
    if "norm" in name or name.endswith("bias"):
        return "F32"
    return "Q6_K" if "down_proj" in name or "lm_head" in name else "Q5_K" if "v_proj" in name else "Q4_K"


@pytest.mark.parametrize("kind", [*(name for name in TYPE_NAMES if name != "F32"), "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantized_weights_are_what_they_stand_for(family: str, kind: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model", family, seed=4, **LARGE)
    kinds = mixed if kind == "mixed" else all_of(kind)
    path = write_gguf(tmp_path / "m.gguf", directory, kinds, dequantized=tmp_path / "dequantized")
    got, expected = logits(path, dtype="float32", quantized_blocks="expand"), logits(tmp_path / "dequantized")
    assert expected.std() > 0.1
    assert (got - expected).abs().max() < 1e-4


def test_pieces_of_a_tensor_are_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny(tmp_path / "model", seed=4, **BIASES)
    path = write_gguf(tmp_path / "m.gguf", directory)
    calls = []
    whole = load_model(str(path)).model.provider
    monkeypatch.setattr(gguf_checkpoint, "PIECE_NUMBERS", 1000)
    pieces = load_model(str(path), progress=lambda done, total: calls.append((done, total))).model.provider
    for i in range(3):
        assert all(torch.equal(weight, pieces.layer(i)[name]) for name, weight in whole.layer(i).items())
    assert len(calls) > 60
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == sum(info.num_bytes for info in open_checkpoint(path).tensors().values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_expansion_is_announced(dtype: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model", seed=4, **LARGE)
    path = write_gguf(tmp_path / "m.gguf", directory, mixed)
    loaded = load_model(str(path), dtype=dtype, quantized_blocks="expand")
    assert loaded.notice is not None
    why = "the settings ask" if "Q4_K" in dispatch.block_types("cpu", getattr(torch, dtype)) else "no kernel"
    assert loaded.notice.startswith(f"Q4_K, Q5_K, Q6_K expanded to {dtype}, as {why}")


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_the_dtype_is_that_of_most_weights(kind: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_tiny(tmp_path / "model", **LARGE), all_of(kind))
    assert open_checkpoint(path).spec.dtype == getattr(torch, dtype)


def test_eos_ids(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model")

    def ends(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)

    assert load_model(str(write_gguf(tmp_path / "m.gguf", directory, extra=ends))).eos_ids == (7, 9)
    beyond = write_gguf(tmp_path / "b.gguf", directory, extra=lambda writer: writer.add_eos_token_id(320))
    refused(beyond, "eos_token_id is 320", "320 tokens")


# What is refused


REFUSED_KEYS = [
    ({"block_count": None}, ModelLoadError, ["has no llama.block_count"]),
    ({"block_count": 2**32 - 1}, ModelLoadError, ["block_count is 4294967295", "30 tensors"]),
    ({"block_count": 2}, ModelLoadError, ["has tensors blk.2.", "the metadata"]),
    ({"block_count": 4}, ModelLoadError, ["lacks tensors blk.3."]),
    ({"embedding_length": 64}, ModelLoadError, ["at byte", "has shape", "the metadata asks for"]),
    ({"feed_forward_length": 95}, ModelLoadError, ["tensor blk.0.ffn_", "has shape [96, 48]"]),
    ({"feed_forward_length": 2**32 - 1}, ModelLoadError, ["'intermediate_size' must be positive and at most"]),
    ({"feed_forward_length": [96, 96, 95]}, Unsupported, ["feed_forward_length differs from layer to layer"]),
    ({"attention.head_count": 0}, ModelLoadError, ["head_count must be at least 1"]),
    ({"attention.head_count": 5}, ModelLoadError, ["metadata read as config.json", "multiple"]),
    ({"attention.key_length": 7}, Unsupported, ["value_length is not the heads' 7"]),
    ({"attention.layer_norm_rms_epsilon": math.nan}, ModelLoadError, ["rms_epsilon is nan"]),
    ({"attention.layer_norm_rms_epsilon": -1.0}, ModelLoadError, ["rms_norm_eps", "positive"]),
    ({"rope.dimension_count": 4}, Unsupported, ["rope.dimension_count is not the heads' 8"]),
    ({"rope.scaling.type": "longrope"}, Unsupported, ["'longrope'"]),
    ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, Unsupported, ["yarn_ext_factor"]),
    ({"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.19}, Unsupported, ["attn_factor"]),
    ({"rope.scaling.attn_factor": 1.19}, Unsupported, ["attn_factor"]),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, ModelLoadError, ["factor", "positive"]),
    ({"expert_count": 8}, Unsupported, ["llama.expert_count is 8"]),
    ({"attention.scale": 0.5}, Unsupported, ["llama.attention.scale is 0.5"]),
    ({"context_length": "long"}, ModelLoadError, ["context_length must be an integer"]),
]


@pytest.mark.parametrize(("metadata", "error", "words"), REFUSED_KEYS)
def test_keys_that_are_wrong(metadata, error, words, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_tiny(tmp_path / "model"), **metadata)
    refused(path, str(path), *words, error=error)


def test_keys_that_are_wrong_elsewhere(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model", "qwen2")
    window = write_gguf(tmp_path / "w.gguf", directory, **{"attention.sliding_window": 11})
    refused(window, "qwen2.attention.sliding_window 11", error=Unsupported)
    raw = json.loads((directory / "config.json").read_text()) | {"model_type": "gemma3", "architectures": ["Gemma3"]}
    (directory / "config.json").write_text(json.dumps(raw))
    refused(write_gguf(tmp_path / "g.gguf", directory), "'gemma3' is not supported", "llama, qwen2", error=Unsupported)


def test_tensors_that_are_wrong(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model")
    more = write_gguf(tmp_path / "more.gguf", directory, tensors={"blk.0.attn_sub_norm.weight": np.ones(8, np.float32)})
    refused(more, "has tensor blk.0.attn_sub_norm.weight")
    bias = write_gguf(tmp_path / "bias.gguf", directory, tensors={"blk.0.attn_q.bias": np.ones(48, np.float32)})
    refused(bias, "lacks tensors blk.0.attn_k.bias")


def test_a_tokenizer_with_other_tokens_than_embeddings(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model")
    path = write_gguf(
        tmp_path / "m.gguf", directory, extra=lambda writer: writer.add_token_list([f"t{i}" for i in range(319)])
    )
    refused(path, "319 tokens", "'token_embd.weight' at byte", "320 rows")


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_scales_that_are_not_finite(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_tiny(tmp_path / "model", **LARGE), all_of(kind))
    tensor = read_gguf(path).tensors["blk.1.attn_q.weight"]
    row = tensor.num_bytes // tensor.shape[0]
    block = tensor.offset + 5 * row + row // tensor.type.num_bytes // 2 * tensor.type.num_bytes
    content = bytearray(path.read_bytes())
    at = block + (208 if kind == "Q6_K" else 0)
    content[at : at + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(content)
    refused(path, f"'blk.1.attn_q.weight' at byte {tensor.offset}", f"its block at byte {block} has a scale")


def test_a_model_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "model", **LARGE)
    path = write_gguf(tmp_path / "m.gguf", directory, all_of("Q8_0"))
    whole = {dtype: bytes_of_weights(directory, dtype) for dtype in (torch.float32, torch.bfloat16)}

    def calls_for_no_progress(done: int, total: int) -> None:
        raise AssertionError("weights were read")

    def check(model: Path, free: int, *words: str, **options: str) -> None:
        refused(
            *(model, str(model), *words),
            error=ConfigError,
            dtype="float32",
            memory_bytes=free,
            progress=calls_for_no_progress,
            **options,
        )

    check(directory, whole[torch.float32] - 1, "set dtype to bfloat16")
    load_model(str(directory), dtype="float32", memory_bytes=whole[torch.float32])
    if not dispatch.block_types("cpu", torch.float32):
        check(directory, 1000, "even as bfloat16", "smaller model")
    else:
        sizes = {dtype: bytes_of_weights(directory, dtype, "int8") for dtype in whole}
        check(directory, sizes[torch.float32], "set quantization to int8")
        check(directory, sizes[torch.bfloat16], "set dtype to bfloat16 and quantization to int8")
        check(directory, 1000, "even as int4 and bfloat16", "smaller model")
        in_blocks = bytes_of_weights(path, torch.float32)
        assert in_blocks < sizes[torch.bfloat16]
        load_model(str(path), dtype="float32", memory_bytes=in_blocks)
        check(path, in_blocks, "as Q8_0 and float32", "set quantized_blocks to auto", quantized_blocks="expand")
        check(path, in_blocks, "as Q8_0 and float32", ": leave out quantization", quantization="int8")


# Fuzzing


def valid_bytes(directory: Path) -> bytes:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    tiny = write_tiny(directory / "model", num_hidden_layers=1, eos_token_id=None, **sizes)
    return write_gguf(directory / "valid.gguf", tiny, all_of("Q8_0")).read_bytes()


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return valid_bytes(tmp_path_factory.mktemp("valid"))


def check_mutated(path: Path, valid: bytes, edits: list[tuple[float, int]], cut: int) -> None:
    """Loading ends with a model or a named error. Edits are to the header, where most bytes mean something."""
    header = valid.index(b"output_norm") + 2000
    content = bytearray(valid)
    for place, byte in edits:
        content[int(place * header)] = byte
    path.write_bytes(content[: len(content) - cut])
    refusal = ""
    try:
        load_model(str(path), memory_bytes=64 << 20)
    except (ModelLoadError, Unsupported, ConfigError) as error:
        refusal = error.message
    assert len(refusal) < 4000


EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3)
SLOW = [HealthCheck.function_scoped_fixture]


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(EDITS, st.integers(0, 1))
def test_mutated_files(tmp_path: Path, valid: bytes, edits: list[tuple[float, int]], cut: int) -> None:
    check_mutated(tmp_path / "m.gguf", valid, edits, cut)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None, suppress_health_check=SLOW)
@given(EDITS, st.integers(0, 1))
def test_many_mutated_files(tmp_path: Path, valid: bytes, edits: list[tuple[float, int]], cut: int) -> None:
    check_mutated(tmp_path / "m.gguf", valid, edits, cut)


def test_headers_that_claim_a_model_without_tensors(tmp_path: Path) -> None:
    entries = [entry("general.architecture", 8, struct.pack("<Q", 5) + b"llama"), texts("tokenizer.ggml.tokens", "a")]
    path = tmp_path / "m.gguf"
    path.write_bytes(forge(entries))
    refused(path, "lacks tensor token_embd.weight")
    path.write_bytes(forge([*entries, u32("llama.expert_count", 0), entry("a", F32, struct.pack("<f", 1))]))
    refused(path, "lacks tensor token_embd.weight")
    path.write_bytes(forge([entry("general.architecture", U32, b"\0" * 4)]))
    refused(path, "general.architecture must be a string")
