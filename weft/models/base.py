"""Interfaces of a model: its spec, the shape of its KV, its layers, and the provider of its weights.

Checkpoints are the matter of `loader.py`, families of `registry.py`. The worker owns the loop over layers:

    x = model.embed(token_ids)
    for index, layer in enumerate(model.layers):
        weights = model.provider.layer(index)
        x = layer.forward(x, weights, batch, kv[index])
    logits = model.head(model.final_norm(x[output_tokens]))

Shapes use: T query tokens, H hidden size, V vocabulary, O output rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.kernels.batch import AttentionBatch, lower

__all__ = [
    "AttentionBatch",
    "KVSpec",
    "LanguageModel",
    "Layer",
    "LayerKV",
    "ModelSpec",
    "ResidentWeights",
    "RopeSpec",
    "lower",
]


class RopeSpec(NamedTuple):
    """Rotary position embedding (Su et al., 2021) and how its frequencies are scaled."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    """llama3"""
    high_freq_factor: float = 4.0
    """llama3"""
    attention_factor: float = 1.0
    """yarn: factor on cos and sin."""
    beta_fast: float = 32.0
    """yarn"""
    beta_slow: float = 1.0
    """yarn"""
    truncate: bool = True
    """yarn: round the corrected range to whole dimensions."""
    factors: tuple[float, ...] = ()
    """factors: divisor of each frequency, [head_dim / 2]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The options of config.json that a model's output depends on."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest sequence in tokens, with the scaling of positions."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: number of KV entries that a query sees, including its own; None: all."""
    rope: RopeSpec
    rms_eps: float
    tie_embeddings: bool
    dtype: torch.dtype
    """Dtype of weights, activations and KV."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each query and key head is normalised before the rotation."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantization of the layers' projections; None: they have `dtype`."""
    block_types: tuple[str, ...] = ()
    """Types of quantized blocks that matrices are kept in and multiplied as, if the checkpoint has them so; sorted."""


class LayerKV(NamedTuple):
    """The KV of one token in one layer: K and V, each `num_kv_heads` vectors of `head_dim`."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV that a model keeps per token: one entry per layer, all of one dtype."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype

    def bytes_per_page(self, page_size: int) -> int:
        """KV bytes of a page of `page_size` tokens over all layers."""
        return page_size * self.dtype.itemsize * sum(2 * k.num_kv_heads * k.head_dim for k in self.layers)

    def layer_shape(self, index: int, num_pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        """The shape of layer `index`'s KV tensor: [pages, 2 (K, V), KV heads, page size, head size]."""
        layer = self.layers[index]
        return (num_pages, 2, layer.num_kv_heads, page_size, layer.head_dim)


class ResidentWeights:
    """Provider of weights: all of them are resident on the device."""

    def __init__(self, shared: Mapping[str, Tensor], layers: Sequence[Mapping[str, Tensor]]):
        self._shared = shared
        self._layers = layers

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """Weights outside the layers: the embedding, the final norm, the head."""
        return self._shared

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """Weights of one layer by their name in the layer. The mapping never changes."""
        return self._layers[index]


class Layer(Protocol):
    """One block of a model. It keeps no state of a pass; of weights it keeps only the last prepared ones."""

    def attend(self, x: Tensor, weights: Mapping[str, Tensor], batch: AttentionBatch, kv: Tensor) -> Tensor:
        """x [T, H] -> x plus attention, [T, H]. Writes the batch's KV into `kv` before reading it.

        `x` is consumed: the result may share its memory.
        """
        ...

    def feed_forward(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """x [T, H] -> x plus the feed-forward part, [T, H]. `x` is consumed."""
        ...

    def forward(self, x: Tensor, weights: Mapping[str, Tensor], batch: AttentionBatch, kv: Tensor) -> Tensor:
        """`feed_forward(attend(x))` with the operations between them fused, for callers that need all rows."""
        ...


class LanguageModel(Protocol):
    """A decoder-only language model, layer by layer; the worker owns the loop over layers."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes and options of the architecture."""
        ...

    @property
    def provider(self) -> ResidentWeights:
        """Where the weights of `layers` come from."""
        ...

    @property
    def layers(self) -> Sequence[Layer]:
        """The blocks, first to last."""
        ...

    def kv_spec(self) -> KVSpec:
        """The KV it keeps per token."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 or int32, each below the vocabulary -> input embeddings [T, H], freshly allocated."""
        ...

    def final_norm(self, x: Tensor) -> Tensor:
        """x [O, H] after the last layer -> the final hidden states [O, H]. `x` is kept."""
        ...

    def head(self, x: Tensor) -> Tensor:
        """Final hidden states [O, H] -> logits [O, V], float32 unless the model's dtype is float64."""
        ...
