"""Checkpoints with random weights: small ones for tests, full shapes for benchmarks.

The same arguments and seed give the same files. Weights are scaled so that logits have the spread of a trained model's,
which makes the comparison of greedy tokens meaningful.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from weft.models.layers.weights import WeightSource, WeightTarget
from weft.models.registry import family_of
from weft.models.safetensors_files import INDEX_FILE, SINGLE_FILE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TINY: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": IM_END_ID,
    "bos_token_id": None,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {**_TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "mistral": {
            **_TINY,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": None,
        },
        "qwen2": {**_TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "qwen3": {**_TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    }
)
"""Family -> the config.json of its tiny checkpoint."""

QWEN3_0_6B: Mapping[str, Any] = MappingProxyType(
    {
        **FAMILIES["qwen3"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    }
)
"""The shape of Qwen3-0.6B with a vocabulary of 32,000, for benchmarks."""
QWEN3_0_1B: Mapping[str, Any] = MappingProxyType(
    {
        **QWEN3_0_6B,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
)
"""About 100 million parameters, for benchmarks of many calls."""
QWEN3_1_7B: Mapping[str, Any] = MappingProxyType({**QWEN3_0_6B, "hidden_size": 2048, "intermediate_size": 6144})
"""The shape of Qwen3-1.7B with a vocabulary of 32,000."""


def write_tiny(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = False,
    **options: Any,
) -> Path:
    """Write a tiny checkpoint of `family` ("llama", "mistral", "qwen2", "qwen3"); `options` go into config.json."""
    config = {**FAMILIES[family], **options}
    return write_checkpoint(directory, config, seed=seed, dtype=dtype, shards=shards, tokenizer=tokenizer)


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = False,
) -> Path:
    """Write config.json and random weights for it, in `shards` files; returns `directory`, created if it does not
    exist.

    With `tokenizer`, also write a byte-level tokenizer and a chat template (which need a vocabulary of at least 259).
    """
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    if tokenizer:
        write_tokenizer(directory)
    sources = _sources(raw)
    generator = torch.Generator().manual_seed(seed)
    names = list(sources)
    if shards == 1:
        save_file(_draw(sources, names, dtype, generator), directory / SINGLE_FILE, metadata={"format": "pt"})
        return directory
    weight_map = {}
    per_shard = -(-len(names) // shards)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * per_shard : (i + 1) * per_shard]
        save_file(_draw(sources, part, dtype, generator), directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose first 256 tokens are bytes, followed by `SPECIAL_TOKENS`, and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _sources(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint with this config.json has, and its shape."""
    family = family_of(raw)
    spec = family.spec(raw)
    targets: list[WeightTarget] = family.shared_weights(spec)
    for layer in range(spec.num_layers):
        targets += family.layer_weights(spec, layer)
    return {s.name: _shape(s, t) for t in targets for s in t.sources}


def _shape(source: WeightSource, target: WeightTarget) -> tuple[int, ...]:
    return (source.rows, *target.shape[1:])


def _draw(
    shapes: Mapping[str, tuple[int, ...]], names: list[str], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    return {name: _random(name, shapes[name], generator).to(dtype) for name in names}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return values.mul_(0.1).add_(1.0)
    if name.endswith("bias"):
        return values.mul_(0.2)
    if name.endswith("embed_tokens.weight"):
        # Small enough that the blocks, not the input token, determine a tied head's logits.
        return values.mul_(0.3)
    return values.mul_(shape[1] ** -0.5)
