"""A sequence gets the same in any batch: the check, for models with weights in quantized blocks."""

from __future__ import annotations

import torch

from tests.kernels.blocks import rounds_activations
from tests.models.runner import BATCHES, PROMPTS, greedy
from weft.kernels.cpu import ops
from weft.models.base import LanguageModel

SMALL = ([3, 0, 1], [2, 0])
"""Of fewer tokens than tiles are used for."""
FILLER = [7, 8, 9] * 10


def best_kernels() -> ops.CpuKernels:
    """Those that a model takes by itself."""
    best = ops.best()
    assert not isinstance(best, Exception)
    return best


def check_any_batch(model: LanguageModel, kernels: ops.CpuKernels, dtype: str) -> None:
    """The same tokens and logits, to the bit. With tiles, those of a prompt are others in a step of few tokens than in
    one of many."""
    kind = getattr(torch, dtype)
    alone = [greedy(model, [prompt], steps=4) for prompt in PROMPTS]
    among = [greedy(model, [prompt, FILLER], steps=4) for prompt in PROMPTS]
    for batch in (*BATCHES, *SMALL):
        few = rounds_activations(kernels, sum(len(PROMPTS[i]) for i in batch), kind)
        expected = alone if few else among
        tokens, logits = greedy(model, [PROMPTS[i] for i in batch], steps=4)
        for column, i in enumerate(batch):
            assert tokens[column] == expected[i][0][0]
            assert torch.equal(logits[:, column], expected[i][1][:, 0])
    if rounds_activations(kernels, len(FILLER), kind):
        assert all(torch.equal(own[1][:, 0], other[1][:, 0]) for own, other in zip(alone, among, strict=True))
