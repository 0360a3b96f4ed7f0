"""The attention half of a block: norm, fused projection, rotation, paged attention, output projection, residual."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weft.kernels.base import HeadNorm, HeadShape, Kernels
from weft.kernels.batch import AttentionBatch
from weft.models.base import ModelSpec
from weft.models.layers.rope import Rope
from weft.models.layers.weights import WeightTarget, projection, vector


class AttentionBlock:
    """Grouped-query attention of one layer, with the options of the Llama and Qwen families."""

    def __init__(self, spec: ModelSpec, index: int, rope: Rope, kernels: Kernels):
        self._shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._scale = spec.head_dim**-0.5
        self._window = spec.sliding_windows[index]
        self._eps = spec.rms_eps
        self._qk_norm = spec.qk_norm
        self._rope = rope
        self._kernels = kernels

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor], batch: AttentionBatch, kv: Tensor) -> Tensor:
        """x [T, H] -> x plus attention. See `base.Layer.attend`."""
        mixed = self.mix(x, weights, batch, kv)
        return self._kernels.linear(mixed, weights["output"], weights.get("output_bias"), x)

    def mix(self, x: Tensor, weights: Mapping[str, Tensor], batch: AttentionBatch, kv: Tensor) -> Tensor:
        """x [T, H] -> what the output projection takes, [T, num_heads * D]. `x` is kept."""
        kernels = self._kernels
        norm = HeadNorm(weights["q_norm"], weights["k_norm"], self._eps) if self._qk_norm else None
        normed = kernels.rms_norm(x, weights["attention_norm"], self._eps)
        qkv = kernels.linear(normed, weights["qkv"], weights.get("qkv_bias"))
        q = kernels.rotate_and_store(qkv, self._shape, self._rope.rotation(batch), norm, batch, kv)
        return kernels.attention(q, kv, batch, self._scale, self._window)


def attention_weights(spec: ModelSpec, prefix: str) -> list[WeightTarget]:
    """The weights of the block whose tensors are named `prefix` (`model.layers.0`) in the checkpoint."""
    attention = f"{prefix}.self_attn"
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
    targets = [
        vector("attention_norm", f"{prefix}.input_layernorm.weight", spec.hidden_size),
        *projection("qkv", "qkv_bias" if spec.qkv_bias else None, rows, spec.hidden_size),
        *projection(
            "output",
            "output_bias" if spec.output_bias else None,
            {f"{attention}.o_proj": spec.hidden_size},
            queries,
        ),
    ]
    if spec.qk_norm:
        targets.append(vector("q_norm", f"{attention}.q_norm.weight", spec.head_dim))
        targets.append(vector("k_norm", f"{attention}.k_norm.weight", spec.head_dim))
    return targets
