"""From the metadata of a GGUF file to the config.json that the families take, and to the names of tensors.

Refuses what would change a model's output and is not implemented. Keys are those of ggml's gguf.md and of llama.cpp
(`llama-arch.cpp`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.abi.errors import ModelLoadError, Unsupported
from weft.gguf.file import GgufFile, GgufTensor
from weft.gguf.metadata import Metadata
from weft.gguf.tokens import EMBEDDING

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""general.architecture -> architecture of config.json. Mistral's files are `llama` too."""
WINDOWED = "MistralForCausalLM"
"""What a `llama` with a sliding window is."""
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and later have instead of settings."""
OTHER_OUTPUT = (
    *("expert_count", "logit_scale", "residual_scale", "embedding_scale", "final_logit_softcapping"),
    *("attn_logit_softcapping", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"),
    *("attention.temperature_scale", "rope.scaling.yarn_log_multiplier", "rope.dimension_sections"),
)
"""Keys of an architecture that no supported model has, or only with the value 0."""

_NAMES = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": "output_norm.weight", "lm_head.weight": HEAD}
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")


def stored_name(source: str) -> str:
    """The name in a GGUF file of the tensor that a `WeightSource` names."""
    found = _IN_LAYER.fullmatch(source)
    return _NAMES[source] if found is None else f"blk.{found[1]}.{_IN_LAYERS[found[2]]}.{found[3]}"


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config.json of a GGUF file. Raises `ModelLoadError` for missing or contradictory keys, else `Unsupported`."""
    meta = file.metadata
    name = meta.text("general.architecture")
    if name not in ARCHITECTURES:
        raise Unsupported(
            f"{file.path}: architecture {name!r} is not supported in GGUF; there are {', '.join(sorted(ARCHITECTURES))}"
        )
    for key in OTHER_OUTPUT:
        value: Any = meta.get(f"{name}.{key}", 0)
        if np.any(value):
            raise Unsupported(f"{file.path}: {name}.{key} is {value}, which is not supported")
    if EMBEDDING not in file.tensors:
        raise ModelLoadError(f"{file.path} lacks tensor {EMBEDDING}, which {name} needs")
    heads, hidden = meta.integer(f"{name}.attention.head_count"), meta.integer(f"{name}.embedding_length")
    head_dim = meta.integer(f"{name}.attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(f"{name}.{key}", head_dim) != head_dim:
            raise Unsupported(f"{file.path}: {name}.{key} is not the heads' {head_dim}, which is not supported")
    layers, context = meta.integer(f"{name}.block_count"), meta.integer(f"{name}.context_length")
    if layers > len(file.tensors):
        raise ModelLoadError(f"{file.path}: {name}.block_count is {layers}, and there are {len(file.tensors)} tensors")
    window = meta.integer(f"{name}.attention.sliding_window", 0, least=0)
    windowed = 0 < window < context
    if windowed and name != "llama":
        raise Unsupported(f"{file.path}: {name}.attention.sliding_window {window} is not supported in GGUF")
    return {
        "architectures": [WINDOWED if windowed else ARCHITECTURES[name]],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "sliding_window": window if windowed else None,
        "rms_norm_eps": meta.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{name}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(meta, f"{name}.rope", context),
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": dtype_name(file.tensors),
    }


def _rope_scaling(meta: Metadata, rope: str, context: int) -> dict[str, Any] | None:
    """Scaling of positions; None: they are not scaled."""
    factor = meta.number(f"{rope}.scaling.factor", meta.number(f"{rope}.scale_linear", 1.0))  # older files
    kind = meta.text(f"{rope}.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind in ("none", "linear") and meta.number(f"{rope}.scaling.attn_factor", 1.0) != 1:
        raise Unsupported(f"{meta.path}: {rope}.scaling.attn_factor is not 1, which is not supported without yarn")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise Unsupported(f"{meta.path}: {rope}.scaling.type {kind!r} is not supported; there are none, linear, yarn")
    if meta.number(f"{rope}.scaling.yarn_ext_factor", 1.0) != 1:
        raise Unsupported(f"{meta.path}: {rope}.scaling.yarn_ext_factor is not 1, which is not supported")
    # ggml multiplies these factors with YaRN's own, where config.json replaces it.
    factors = [meta.number(f"{rope}.scaling.{key}", 1.0) for key in ("attn_factor", "yarn_attn_factor")]
    own = 1.0 if factor <= 1 else 0.1 * float(np.log(factor)) + 1.0
    return {
        **scaling,
        "original_max_position_embeddings": meta.integer(f"{rope}.scaling.original_context_length", context),
        "attention_factor": own * factors[0] * factors[1],
        "beta_fast": meta.number(f"{rope}.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number(f"{rope}.scaling.yarn_beta_slow", 1.0),
    }


def dtype_name(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype of most bytes: bfloat16 for quantized blocks, which is half of float32 and has float32's range."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")
