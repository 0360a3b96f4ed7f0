"""A worker's loop in the small: plays sequences through a model, over pages in no order, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.config import Quantization, QuantizedBlocks
from weft.core.step import ForwardBatch
from weft.kernels import dispatch
from weft.kernels.base import Kernels
from weft.models.base import LanguageModel, lower
from weft.models.footprint import weight_bytes, with_settings
from weft.models.loader import open_checkpoint

PROMPTS = [[5, 9, 200, 31, 7], [301], [44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56], [7, 7], [1, 2, 3] * 9]
with_kernels = pytest.mark.skipif(
    not dispatch.block_types("cpu", torch.float32), reason="without the library in C++ nothing is quantized"
)
BATCHES = ([0], [1], [2], [3, 4, 0], [0, 1, 2, 3, 4], [4, 2])
"""Of these prompts."""


def plain(prefer: str = "reference") -> Kernels:
    """The operations in plain torch, for any dtype."""
    return dispatch.select("cpu", torch.bfloat16, prefer={"*": prefer})


def bytes_of_weights(
    path: Path, dtype: torch.dtype, quantization: Quantization | None = None, blocks: QuantizedBlocks = "auto"
) -> int:
    checkpoint = open_checkpoint(path)
    return weight_bytes(checkpoint, with_settings(checkpoint, dtype, "cpu", quantization, blocks))


def ragged(rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], page_size: int, **options: object) -> ForwardBatch:
    """A batch of rows (tokens, KV entries before them, page ids)."""
    tokens, positions, slots, pages = [], [], [], []
    q_indptr, kv_indptr, kv_lens = [0], [0], []
    for row_tokens, before, row_pages in rows:
        after = before + len(row_tokens)
        used = row_pages[: -(-after // page_size)]
        tokens += row_tokens
        positions += range(before, after)
        slots += [row_pages[p // page_size] * page_size + p % page_size for p in range(before, after)]
        pages += used
        q_indptr.append(len(tokens))
        kv_indptr.append(len(pages))
        kv_lens.append(after)
    arrays = {
        "token_ids": tokens,
        "positions": positions,
        "write_slots": slots,
        "q_indptr": q_indptr,
        "kv_indptr": kv_indptr,
        "kv_page_ids": pages,
        "kv_lens": kv_lens,
    }
    return ForwardBatch(**{k: np.array(v, np.int32) for k, v in arrays.items()}, **options)


@dataclass
class Sequence_:
    """A sequence: how many tokens are in its pages."""

    pages: list[int]
    length: int = 0


@dataclass
class Runner:
    """Owns the KV of one model and hands out scattered pages."""

    model: LanguageModel
    num_pages: int = 64
    page_size: int = 8
    free: list[int] = field(init=False)
    kv: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.kv_spec()
        # What was never written must never matter.
        self.kv = [
            torch.full(spec.layer_shape(i, self.num_pages, self.page_size), float("nan"), dtype=spec.dtype)
            for i in range(len(spec.layers))
        ]
        self.free = np.random.default_rng(5).permutation(self.num_pages).tolist()

    def open(self, max_tokens: int) -> Sequence_:
        """A new sequence with room for `max_tokens`."""
        return Sequence_([self.free.pop() for _ in range(-(-max_tokens // self.page_size))])

    @torch.inference_mode()
    def run(self, work: Sequence[tuple[Sequence_, Sequence[int]]]) -> list[Tensor]:
        """Append tokens to each sequence in one pass; returns the logits of each, [tokens, V]."""
        batch = ragged([(tokens, s.length, s.pages) for s, tokens in work], self.page_size)
        lowered = lower(batch, self.page_size)
        x = self.model.embed(torch.from_numpy(batch.token_ids))
        for index, layer in enumerate(self.model.layers):
            weights = self.model.provider.layer(index)
            x = layer.forward(x, weights, lowered, self.kv[index])
        logits = self.model.head(self.model.final_norm(x))
        for sequence, tokens in work:
            sequence.length += len(tokens)
        return list(logits.split([len(tokens) for _, tokens in work]))


def greedy(model: LanguageModel, work: Sequence[Sequence[int]], steps: int = 12) -> tuple[list[list[int]], Tensor]:
    """Tokens that each prompt goes on with, all in one batch, and the logits of each step [steps, prompts, V]."""
    runner = Runner(model)
    sequences = [runner.open(len(prompt) + steps) for prompt in work]
    tokens: list[list[int]] = [[] for _ in work]
    news, kept = [list(prompt) for prompt in work], []
    for _ in range(steps):
        logits = [rows[-1] for rows in runner.run(list(zip(sequences, news, strict=True)))]
        kept.append(torch.stack(logits))
        news = [[int(row.argmax())] for row in logits]
        for row, (token,) in zip(tokens, news, strict=True):
            row.append(token)
    return tokens, torch.stack(kept)


def all_weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Those of the layers with the layer's number before their name."""
    provider = model.provider
    layers = {f"{i}.{name}": weight for i in range(len(model.layers)) for name, weight in provider.layer(i).items()}
    return {**provider.shared, **layers}
