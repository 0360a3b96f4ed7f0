"""Mistral: Llama without biases, and a sliding window in every layer where the checkpoint has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.models.base import ModelSpec
from weft.models.config_json import decoder_spec, layer_count, number

ARCHITECTURE = "MistralForCausalLM"
WINDOW_WHEN_ABSENT = 4096
"""The format's default: no window is written as `"sliding_window": null`."""


def spec(raw: Mapping[str, Any]) -> ModelSpec:
    """`sliding_window` holds for every layer; null means none."""
    window: int | None = None
    if raw.get("sliding_window", WINDOW_WHEN_ABSENT) is not None:
        window = number(raw, "sliding_window", int, default=WINDOW_WHEN_ABSENT)
    return decoder_spec(raw, ARCHITECTURE, sliding_windows=(window,) * layer_count(raw))
