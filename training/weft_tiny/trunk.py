"""The blocks of a Llama model for training: plain products, so that a processor's backward pass is fast, and the
attention of one layer's heads can be seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM


class Trunk(nn.Module):
    """Embedding, blocks and final norm of a model whose parameters it uses; ``forward`` equals the model's own."""

    def __init__(self, model: LlamaForCausalLM, seen: int | None = None) -> None:
        super().__init__()
        self.model = model.model
        self.config = model.config
        self.seen = seen
        """The layer whose attention is returned."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [rows, length, width] of tokens [rows, length], and the layer's [rows, heads, length, length].

        Rows are padded on the right, so that causality alone keeps padding from what counts.
        """
        length = tokens.shape[1]
        x = F.embedding(tokens, self.model.embed_tokens.weight)
        positions = torch.arange(length, device=tokens.device)
        cos, sin = self.model.rotary_emb(x, positions[None])
        hidden = torch.full((length, length), -torch.inf, device=tokens.device).triu(1)
        seen = None
        for index, layer in enumerate(self.model.layers):
            y, weights = self._attention(layer.self_attn, self._norm(x, layer.input_layernorm), cos, sin, hidden)
            x = x + y
            y, mlp = self._norm(x, layer.post_attention_layernorm), layer.mlp
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
            if index == self.seen:
                seen = weights
        return self._norm(x, self.model.norm), seen

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), norm.weight, self.config.rms_norm_eps)

    def _attention(
        self, block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, length, _ = x.shape
        size, groups = self.config.head_dim, self.config.num_key_value_heads
        each = self.config.num_attention_heads // groups

        def heads(product: Tensor) -> Tensor:
            return product.view(rows, length, -1, size).transpose(1, 2)

        query = _rotated(heads(block.q_proj(x)), cos, sin).reshape(rows, groups, each * length, size)
        key = _rotated(heads(block.k_proj(x)), cos, sin)
        scores = (query @ key.mT).view(rows, groups, each, length, length) * size**-0.5
        weights = (scores.float() + hidden).softmax(-1).to(scores.dtype)
        mixed = weights.view(rows, groups, each * length, length) @ heads(block.v_proj(x))
        mixed = mixed.view(rows, groups * each, length, size).transpose(1, 2).reshape(rows, length, -1)
        return block.o_proj(mixed), weights.view(rows, groups * each, length, length)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves paired."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
