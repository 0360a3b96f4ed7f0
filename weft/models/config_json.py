"""Reads a checkpoint's config.json, in both generations of its format.

Owns the names and defaults of the format, and refuses options that would change a model's output and are not
implemented. Family files call `decoder_spec`. Transformers 5 writes the rotary settings as
`rope_parameters`; older files have `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from weft.abi.errors import ModelLoadError, Unsupported
from weft.models.base import ModelSpec, RopeSpec
from weft.models.quantized.settings import MAX_SIZE

N = TypeVar("N", int, float, bool)
MAX_LAYERS = 1 << 12
"""Of all checkpoints; the largest of the families have some 130. What is made of each layer is made before any tensor
is known."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def decoder_spec(
    raw: Mapping[str, Any],
    architecture: str,
    *,
    sliding_windows: tuple[int | None, ...] | None = None,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """The spec of a decoder whose config.json is `raw`; keyword arguments are fixed by the family.

    Raises `ModelLoadError` for missing or impossible values, `Unsupported` for options that are not implemented.
    """
    refuse_unimplemented(raw)
    num_layers = layer_count(raw)
    num_heads = number(raw, "num_attention_heads", int)
    hidden_size = number(raw, "hidden_size", int)
    num_kv_heads = number(raw, "num_key_value_heads", int, default=num_heads)
    head_dim = number(raw, "head_dim", int, default=default_head_dim or hidden_size // num_heads)
    if head_dim < 1:
        raise ModelLoadError(f"config.json: {num_heads} heads are more than hidden_size ({hidden_size}) has room for")
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    positions = number(raw, "max_position_embeddings", int)
    rope = rope_spec(raw, positions)
    max_position = _max_position(positions, rope)
    if max_position < 1:
        raise ModelLoadError(f"config.json: the rope factor {rope.factor} leaves none of {positions} positions")
    return ModelSpec(
        architecture=architecture,
        vocab_size=number(raw, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=number(raw, "intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        sliding_windows=sliding_windows or (None,) * num_layers,
        rope=rope,
        rms_eps=number(raw, "rms_norm_eps", float, default=1e-6),
        tie_embeddings=number(raw, "tie_word_embeddings", bool, default=False),
        dtype=checkpoint_dtype(raw),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def number(raw: Mapping[str, Any], key: str, kind: type[N], default: N | None = None) -> N:
    """`raw[key]`, of `kind`; sizes must be positive. null counts as absent. Raises `ModelLoadError`."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelLoadError(f"config.json has no {key!r}, which this architecture needs")
        return default
    # In Python bool is an int, but JSON's true is not a size.
    if not isinstance(value, (int, float) if kind is float else kind) or (type(value) is bool and kind is not bool):
        raise ModelLoadError(f"config.json: {key!r} must be of type {kind.__name__}, got {value!r:.100}")
    most = MAX_SIZE if kind is int else sys.float_info.max
    if kind is not bool and not 0 < value <= most:
        raise ModelLoadError(f"config.json: {key!r} must be positive and at most {most}, got {value!r:.100}")
    return kind(value)


def layer_count(raw: Mapping[str, Any]) -> int:
    """`num_hidden_layers`. Raises `ModelLoadError` for more than `MAX_LAYERS`."""
    count = number(raw, "num_hidden_layers", int)
    if count > MAX_LAYERS:
        raise ModelLoadError(f"config.json: 'num_hidden_layers' is {count}; there may be {MAX_LAYERS}")
    return count


def refuse_unimplemented(raw: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for an option that changes the output in a way these models do not follow.

    `pretraining_tp`, dropout and initializer settings do not matter to inference and are ignored, as is `auto_map`:
    code in a checkpoint is never executed. Quantized weights are the matter of `quantized`.
    """
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise Unsupported(f"hidden_act {activation!r} is not supported; these models use 'silu'")


def rope_spec(raw: Mapping[str, Any], max_position: int) -> RopeSpec:
    """The rotary settings of a config.json whose `max_position_embeddings` is `max_position`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelLoadError(f"config.json: the rope settings must be an object, got {given!r}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise Unsupported(f"rope settings per layer type ({', '.join(map(str, given))}) are not supported")
    partial = raw.get("partial_rotary_factor", given.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise Unsupported(f"partial_rotary_factor {partial!r} is not supported; only whole heads are rotated")
    theta = number(given, "rope_theta", float, default=number(raw, "rope_theta", float, default=10_000.0))
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise Unsupported(
            f"rope type {kind!r} is not supported: there are default, linear, llama3 and yarn. Types whose "
            "frequencies depend on a sequence's length (dynamic, longrope) cannot be, because cached keys do not "
            "follow the change"
        )
    factor = number(given, "factor", float)
    nested = number(given, "original_max_position_embeddings", int, default=max_position)
    original = number(raw, "original_max_position_embeddings", int, default=nested)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor, original)
    if kind == "llama3":
        low, high = number(given, "low_freq_factor", float), number(given, "high_freq_factor", float)
        if low == high:
            raise ModelLoadError(f"config.json: low_freq_factor and high_freq_factor must differ, both are {low}")
        return RopeSpec(theta, "llama3", factor, original, low, high)
    if theta <= 1:
        raise ModelLoadError(f"config.json: yarn needs a rope_theta above 1, got {theta}")
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=_yarn_rotations(given, "beta_fast", 32.0, original),
        beta_slow=_yarn_rotations(given, "beta_slow", 1.0, original),
        truncate=number(given, "truncate", bool, default=True),
    )


def window_layers(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The windows of the Qwen families: from layer `max_window_layers` on, or as `layer_types` says, if in use."""
    num_layers = layer_count(raw)
    if not raw.get("use_sliding_window"):
        return (None,) * num_layers
    if "sliding_window" in raw and raw["sliding_window"] is None:  # no window; the default is for an absent one
        return (None,) * num_layers
    window = number(raw, "sliding_window", int, default=4096)
    types = raw.get("layer_types")
    if types is None:
        # Zero is a meaningful value here: every layer has a window.
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelLoadError(f"config.json: 'max_window_layers' must be an int, got {first!r}")
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelLoadError(f"config.json: 'layer_types' must be a list of {num_layers} names, got {types!r:.100}")
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise Unsupported(f"layer types {unknown} are not supported; there are full_attention and sliding_attention")
    return tuple(window if t == "sliding_attention" else None for t in types)


def checkpoint_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    """The dtype that config.json states (`dtype`, formerly `torch_dtype`); float32 when it states none."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise Unsupported(f"dtype {name!r} is not supported; there are {sorted(DTYPES)}")
    return DTYPES[name]


def _max_position(positions: int, rope: RopeSpec) -> int:
    """The context length after scaling: linear and yarn state the length before scaling, llama3 after."""
    if rope.kind == "linear":
        return int(min(positions * rope.factor, MAX_SIZE))
    if rope.kind == "yarn":
        return max(positions, int(min(rope.original_max_position * rope.factor, MAX_SIZE)))
    return positions


def _yarn_rotations(given: Mapping[str, Any], key: str, default: float, original: int) -> float:
    """So many rotations of a pair of components within `original` positions that the length of one is a number."""
    rotations = number(given, key, float, default=default)
    if not 0 < original / (2 * math.pi * rotations) < math.inf:
        raise ModelLoadError(f"config.json: {key!r} is {rotations}, which is out of range")
    return rotations


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Factor on cos and sin (YaRN, section 3.4), or the checkpoint's value."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    stated = number(given, "attention_factor", float, default=math.inf)
    if math.isfinite(stated):
        return stated
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(number(given, "mscale", float)) / scale(number(given, "mscale_all_dim", float))
    return scale(1.0)
