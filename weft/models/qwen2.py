"""Qwen 2 and 2.5: biases on queries, keys and values, and an optional window in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.models.base import ModelSpec
from weft.models.config_json import decoder_spec, window_layers

ARCHITECTURE = "Qwen2ForCausalLM"


def spec(raw: Mapping[str, Any]) -> ModelSpec:
    """The biases are not optional in this family; `use_sliding_window` turns the windows on."""
    return decoder_spec(raw, ARCHITECTURE, sliding_windows=window_layers(raw), qkv_bias=True)
