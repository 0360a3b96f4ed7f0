"""A decoder-only model of pre-norm blocks, used by the Llama, Mistral and Qwen families.

Families differ only in their `ModelSpec` (biases, norms of heads, windows, scaling).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.kernels.base import Block, BlockShape, HeadShape, Kernels, Norm
from weft.kernels.batch import AttentionBatch
from weft.models.base import KVSpec, Layer, LayerKV, ModelSpec, ResidentWeights
from weft.models.layers.attention import AttentionBlock, attention_weights
from weft.models.layers.mlp import GatedMlp, mlp_weights
from weft.models.layers.rope import Rope
from weft.models.layers.weights import WeightSource, WeightTarget, vector


class DecoderLayer:
    """One decoder block: attention and feed-forward part, each with a norm before it; a `base.Layer`."""

    def __init__(self, spec: ModelSpec, index: int, rope: Rope, kernels: Kernels):
        self._attention = AttentionBlock(spec, index, rope, kernels)
        self._mlp = GatedMlp(spec, kernels)
        self._rope = rope
        self._eps = spec.rms_eps
        self._kernels = kernels
        heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._shape = BlockShape(heads, spec.rms_eps, spec.head_dim**-0.5, spec.sliding_windows[index])
        self._prepared: tuple[Mapping[str, Tensor], Block | None] | None = None

    def attend(self, x: Tensor, weights: Mapping[str, Tensor], batch: AttentionBatch, kv: Tensor) -> Tensor:
        """Attention part: x [T, H] to [T, H], residual added."""
        return self._attention(x, weights, batch, kv)

    def feed_forward(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Feed-forward part: x [T, H] to [T, H], residual added."""
        return self._mlp(x, weights)

    def forward(self, x: Tensor, weights: Mapping[str, Tensor], batch: AttentionBatch, kv: Tensor) -> Tensor:
        """Both parts: x [T, H] to [T, H]."""
        block = self._block(weights)
        done = None if block is None else block(x, self._rope.rotation, batch, kv)
        if done is not None:
            return done
        mixed = self._attention.mix(x, weights, batch, kv)
        bias = weights.get("output_bias")
        norm = Norm(weights["mlp_norm"], self._eps)
        x, normed = self._kernels.linear_rms_norm(mixed, weights["output"], x, norm, bias)
        return self._mlp.project(normed, x, weights)

    def _block(self, weights: Mapping[str, Tensor]) -> Block | None:
        """The layer as one operation, prepared on the first call with these weights."""
        if self._prepared is None or self._prepared[0] is not weights:
            self._prepared = (weights, self._kernels.prepare_block(self._shape, weights))
        return self._prepared[1]


class DecoderModel:
    """Embedding, blocks, final norm and head. See `base.LanguageModel`."""

    def __init__(self, spec: ModelSpec, provider: ResidentWeights, kernels: Kernels):
        self._spec = spec
        self._provider = provider
        self._kernels = kernels
        rope = Rope(spec.rope, spec.head_dim, provider.shared["embedding"].device)
        self._layers = [DecoderLayer(spec, i, rope, kernels) for i in range(spec.num_layers)]

    @property
    def spec(self) -> ModelSpec:
        """Sizes and options of the architecture."""
        return self._spec

    @property
    def provider(self) -> ResidentWeights:
        """The provider of all weights."""
        return self._provider

    @property
    def layers(self) -> Sequence[Layer]:
        """The decoder layers, in order."""
        return self._layers

    def kv_spec(self) -> KVSpec:
        """Shape and bytes of each layer's KV."""
        layer = LayerKV(self._spec.num_kv_heads, self._spec.head_dim)
        return KVSpec((layer,) * self._spec.num_layers, self._spec.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] to input embeddings [T, H]."""
        return self._kernels.take_rows(self._provider.shared["embedding"], token_ids, self._spec.dtype)

    def final_norm(self, x: Tensor) -> Tensor:
        """Norm before the head: [T, H] to [T, H]."""
        return self._kernels.rms_norm(x, self._provider.shared["final_norm"], self._spec.rms_eps)

    def head(self, x: Tensor) -> Tensor:
        """Hidden states [n, H] to logits [n, V]."""
        shared = self._provider.shared
        logits = self._kernels.linear(x, shared["embedding" if self._spec.tie_embeddings else "head"])
        return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def shared_weights(spec: ModelSpec) -> list[WeightTarget]:
    """The weights outside the layers. A tied head is the embedding and has no weight of its own."""
    table = (spec.vocab_size, spec.hidden_size)
    targets = [
        WeightTarget(
            "embedding",
            table,
            (WeightSource("model.embed_tokens.weight", spec.vocab_size),),
            packed=spec.tie_embeddings,
        ),
        vector("final_norm", "model.norm.weight", spec.hidden_size),
    ]
    if not spec.tie_embeddings:
        targets.append(WeightTarget("head", table, (WeightSource("lm_head.weight", spec.vocab_size),), packed=True))
    return targets


def layer_weights(spec: ModelSpec, index: int) -> list[WeightTarget]:
    """The weights of one layer."""
    prefix = f"model.layers.{index}"
    return [*attention_weights(spec, prefix), *mlp_weights(spec, prefix)]
