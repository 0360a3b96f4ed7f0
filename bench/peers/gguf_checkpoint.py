"""Qwen3 checkpoints as GGUF, for peers that read that. Needs the `gguf` package.

Owns the names and the metadata. What a file is for decides its precision and whether it names tokens: a reader that
insists on a tokenizer gets one of placeholders, because every peer is given token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

_GLOBAL = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_LAYER = {
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


def gguf_file(checkpoint: Path, precision: Literal["bf16", "f16"], tokens: bool = False) -> Path:
    """The checkpoint as GGUF, in a file next to it that is written the first time.

    In f16, weights nearer to zero than 0.00006 keep fewer digits, which changes one in 7,000 of a random checkpoint.
    """
    file = checkpoint / f"model-{precision}.gguf"
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        _write(checkpoint, unfinished, precision, tokens)
        unfinished.replace(file)
    return file


def _write(checkpoint: Path, file: Path, precision: Literal["bf16", "f16"], tokens: bool) -> None:
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["Qwen3ForCausalLM"] or not config["tie_word_embeddings"]:
        raise ValueError("only Qwen3 checkpoints with tied embeddings can be written as GGUF here")
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = gguf.LlamaFileType.MOSTLY_BF16 if precision == "bf16" else gguf.LlamaFileType.MOSTLY_F16
    writer.add_file_type(kind)
    if tokens:
        _add_tokens(writer, config["vocab_size"], gguf.TokenType)
    else:
        writer.add_tokenizer_model("none")
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
        elif precision == "f16":
            writer.add_tensor(_gguf_name(name), tensor.to(torch.float16).numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
            writer.add_tensor(_gguf_name(name), raw.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: Any, vocab_size: int, types: Any) -> None:
    """Placeholders. OpenVINO's tokenizer does not compile unless there is a control token among them."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{token}>" for token in range(vocab_size)])
    writer.add_token_types([types.CONTROL] + [types.NORMAL] * (vocab_size - 1))
    writer.add_token_merges(["< 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _gguf_name(name: str) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"
