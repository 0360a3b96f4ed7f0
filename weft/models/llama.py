"""Llama 2 and 3, and other checkpoints with the Llama architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.models.base import ModelSpec
from weft.models.config_json import decoder_spec, number

ARCHITECTURE = "LlamaForCausalLM"


def spec(raw: Mapping[str, Any]) -> ModelSpec:
    """`attention_bias` gives all four projections of the attention a bias, `mlp_bias` those of the feed-forward."""
    attention_bias = number(raw, "attention_bias", bool, default=False)
    return decoder_spec(
        raw,
        ARCHITECTURE,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=number(raw, "mlp_bias", bool, default=False),
    )
