"""Qwen3 and Llama checkpoints with tied embeddings as GGUF, for peers that read that. Needs the `gguf` package.

Owns the names and the metadata. What a file is for decides its precision and whether it names tokens: a reader that
insists on a tokenizer gets one of placeholders, because every peer is given token ids.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from weft.kernels.quantize import block_kind, quantize

Precision = Literal["bf16", "f16", "q8_0", "q4_0", "q4_k"]
"""Of the matrices; vectors are float32. q4_k: Q4_0 where rows are not whole blocks of 256."""
_ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
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


def gguf_file(checkpoint: Path, precision: Precision, tokens: bool = False, folder: Path | None = None) -> Path:
    """The checkpoint as GGUF, in a file next to it (or in `folder`) that is written the first time.

    In f16, weights nearer to zero than 0.00006 keep fewer digits, which changes one in 7,000 of a random checkpoint.
    """
    file = (folder or checkpoint) / f"model-{precision}.gguf"
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        _write(checkpoint, unfinished, precision, tokens)
        unfinished.replace(file)
    return file


def _write(checkpoint: Path, file: Path, precision: Precision, tokens: bool) -> None:
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["architectures"][0])
    if architecture is None or not config["tie_word_embeddings"]:
        raise ValueError("only Qwen3 and Llama checkpoints with tied embeddings can be written as GGUF here")
    writer = gguf.GGUFWriter(file, architecture)
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
    writer.add_rope_dimension_count(config["head_dim"])
    names = {"q4_k": "Q4_K_S"}
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{names.get(precision, precision.upper())}"])
    if tokens:
        if precision == "f16":
            _add_tokens(writer, [f"<{token}>" for token in range(config["vocab_size"])], ["< 0"], gguf.TokenType)
        else:  # Weft reads it too, and insists on merges of tokens
            _add_tokens(writer, *vocabulary(config["vocab_size"]), gguf.TokenType)
    else:
        writer.add_tokenizer_model("none")
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
            continue
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if architecture == "llama" and heads is not None:
            tensor = _neighbours(tensor, config[heads])
        raw, kind = _stored(tensor, precision)
        writer.add_tensor(_gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(tensor: Tensor, precision: Precision) -> tuple[Any, str]:
    """A matrix as the bytes or numbers of a type, and the type's name."""
    import gguf

    if precision == "f16":
        return tensor.to(torch.float16).numpy(), "F16"
    if precision == "bf16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy().view(np.uint8), "BF16"
    if precision == "q4_k":
        kind = block_kind("int4", tensor.shape[1])
        return quantize(tensor, kind).numpy(), kind
    kind = precision.upper()
    return gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind]), kind


def _neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys as the `llama` architecture has them: components that are rotated together are
    neighbours."""
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary: a control token, the bytes, then words of more and more letters,
    each of a shorter word and a letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens, merges = ["<|end|>", *sorted(ByteLevel.alphabet())][:size], []
    words = list(letters)
    while len(tokens) < size:
        pairs = list(itertools.islice(itertools.product(words, letters), size - len(tokens)))
        merges += [" ".join(pair) for pair in pairs]
        words = ["".join(pair) for pair in pairs]
        tokens += words
    return tokens, merges


def _add_tokens(writer: Any, names: list[str], merges: list[str], types: Any) -> None:
    """Add a vocabulary. OpenVINO's tokenizer does not compile unless there is a control token among them."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([types.CONTROL] + [types.NORMAL] * (len(names) - 1))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _gguf_name(name: str) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"
