"""Qwen 3 (dense): normalised query and key heads, and a separate setting for the head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.models.base import ModelSpec
from weft.models.config_json import decoder_spec, number, window_layers

ARCHITECTURE = "Qwen3ForCausalLM"
HEAD_DIM_WHEN_ABSENT = 128


def spec(raw: Mapping[str, Any]) -> ModelSpec:
    """`attention_bias` gives all four projections of the attention a bias."""
    attention_bias = number(raw, "attention_bias", bool, default=False)
    return decoder_spec(
        raw,
        ARCHITECTURE,
        sliding_windows=window_layers(raw),
        default_head_dim=HEAD_DIM_WHEN_ABSENT,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
