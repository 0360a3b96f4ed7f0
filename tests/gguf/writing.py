"""Writes a tiny checkpoint as a GGUF file with the `gguf` package, in the way of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
OFFSETS = {"Q4_K": (7.5, 5e-4), "Q5_K": (15.5, 2.5e-4), "Q6_K": (0.0, 6e-5)}
"""By type: the minimum that centres the numbers, in scales, and a scale that gives weights their usual spread."""


def all_of(kind: str) -> Callable[[str], str]:
    """Matrices of this type, vectors in F32."""
    return lambda name: "F32" if "norm" in name or name.endswith("bias") else kind


def write_gguf(
    path: Path,
    directory: Path,
    kinds: Callable[[str], str] = lambda name: "F32",
    *,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    split: int = 0,
    dequantized: Path | None = None,
    **metadata: Any,
) -> Path:
    """The checkpoint in `directory` as a GGUF file. `metadata`: keys of the architecture, instead of what they would
    be; None: left out. `dequantized`: a directory that gets the same weights in safetensors."""
    raw = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES.get(raw["architectures"][0], raw["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in {**describe(raw), **metadata}.items():
        add(writer, f"{arch}.{key}", value)
    stored = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        heads = head_count(arch, raw, name)
        kind = gguf.GGMLQuantizationType[kinds(name)]
        data = quantize(interleave(tensor, heads), kind)
        writer.add_tensor(stored_name(name), data, raw_dtype=kind)
        values = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32)).reshape(tensor.shape)
        stored[name] = interleave(values, heads, back=True)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dequantized is not None:
        dequantized.mkdir()
        (dequantized / "config.json").write_text((directory / "config.json").read_text())
        save_file(stored, dequantized / "model.safetensors", metadata={"format": "pt"})
    return path


def distinct(token: int) -> float:
    """A score for each token."""
    return -float(token)


def add_tokenizer(
    writer: gguf.GGUFWriter,
    backend: tokenizers.Tokenizer,
    kind: str,
    score: Callable[[int], float] = distinct,
    *,
    size: int,
) -> None:
    """The tokens and merges of a tokenizer.json; those up to `size` that it lacks are marked as not used."""
    added = backend.get_added_tokens_decoder()
    by_id = {i: text for text, i in backend.get_vocab().items()}
    types = []
    for i in range(size):
        if i not in by_id:
            types.append(gguf.TokenType.UNUSED)
        elif i in added:
            types.append(gguf.TokenType.CONTROL if added[i].special else gguf.TokenType.USER_DEFINED)
        else:
            is_byte = kind == "llama" and by_id[i].startswith("<0x")
            types.append(gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]])
    else:
        writer.add_token_scores([score(i) for i in range(size)])


def describe(raw: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(raw["rms_norm_eps"]),
        "rope.freq_base": float(raw["rope_theta"]),
        "rope.dimension_count": head_dim,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def stored_name(name: str) -> str:
    base, _, ending = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, number, inner = base.split(".", 3)
        return f"blk.{number}.{NAMES[inner]}.{ending}"
    return f"{NAMES[base]}.{ending}"


def head_count(arch: str, raw: Mapping[str, Any], name: str) -> int | None:
    """Heads whose components are stored in pairs, or None."""
    if arch != "llama" or "_proj" not in name:
        return None
    return {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}.get(name.split(".")[-2])


def interleave(tensor: Tensor, heads: int | None, *, back: bool = False) -> Tensor:
    if heads is None:
        return tensor
    split = (heads, -1, 2) if back else (heads, 2, len(tensor) // heads // 2)
    return tensor.reshape(*split, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def quantize(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The tensor in blocks; for types that the package only reads, random blocks of its shape."""
    if kind.name not in OFFSETS:
        return gguf.quantize(tensor.float().numpy(), kind)
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = tensor.shape
    generator = np.random.default_rng(abs(int(tensor[0, 0] * 1e6)))
    blocks = generator.integers(0, 256, (rows * columns // numbers, num_bytes), dtype=np.uint8)
    minimum, scale = OFFSETS[kind.name]
    scales = (scale * generator.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
    first = 208 if kind.name == "Q6_K" else 0
    blocks[:, first : first + 2] = scales.view(np.uint8)
    if minimum:
        blocks[:, 2:4] = (scales * np.float16(minimum)).view(np.uint8)
    return blocks.reshape(rows, -1)
