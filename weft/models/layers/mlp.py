"""The feed-forward half of a block: norm, gated projection (Shazeer, 2020), residual."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weft.kernels.base import Kernels
from weft.models.base import ModelSpec
from weft.models.layers.weights import WeightTarget, projection, vector


class GatedMlp:
    """`x + down(silu(gate(norm(x))) * up(norm(x)))`."""

    def __init__(self, spec: ModelSpec, kernels: Kernels):
        self._eps = spec.rms_eps
        self._kernels = kernels

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """x [T, H] -> x plus the feed-forward part. See `base.Layer.feed_forward`."""
        return self.project(self._kernels.rms_norm(x, weights["mlp_norm"], self._eps), x, weights)

    def project(self, normed: Tensor, residual: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The residual [T, H], which is consumed, plus the feed-forward part of `normed` [T, H]."""
        kernels = self._kernels
        gated = kernels.gated_linear(normed, weights["gate_up"], weights.get("gate_up_bias"))
        return kernels.linear(gated, weights["down"], weights.get("down_bias"), residual)


def mlp_weights(spec: ModelSpec, prefix: str) -> list[WeightTarget]:
    """The weights of the block whose tensors are named `prefix` (`model.layers.0`) in the checkpoint."""
    mlp, size = f"{prefix}.mlp", spec.intermediate_size
    gate_up_bias, down_bias = ("gate_up_bias", "down_bias") if spec.mlp_bias else (None, None)
    return [
        vector("mlp_norm", f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
        *projection("gate_up", gate_up_bias, {f"{mlp}.gate_proj": size, f"{mlp}.up_proj": size}, spec.hidden_size),
        *projection("down", down_bias, {f"{mlp}.down_proj": spec.hidden_size}, size),
    ]
