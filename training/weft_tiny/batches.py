"""Turning examples into token batches: assistant tokens carry the loss, rows of similar length share a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.weft_tiny.data import WEIGHTS, stream
from training.weft_tiny.examples import Example
from training.weft_tiny.render import render

_LEAST_POOL = 2000
"""Rows that are made before they are sorted by length."""
_TYPICAL_ROW = 150
"""Tokens of a conversation, about."""


@dataclass(frozen=True)
class Row:
    """The tokens of one conversation and the weight of each as a target."""

    tokens: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right; ``weights`` is zero wherever a token is not a target."""

    tokens: Tensor
    weights: Tensor
    size: int


def encode(example: Example, tokenizer: Tokenizer, prompt_weight: float) -> Row:
    """Tokenize a conversation turn by turn; assistant turns weigh 1, the rest ``prompt_weight``."""
    text = render(example.messages, example.tools)
    marker, end = "<|im_start|>assistant\n", "<|im_end|>"
    row = Row([], [])
    for index, piece in enumerate(text.split(marker)):
        answer, stop, after = piece.partition(end) if index else ("", "", piece)
        parts = [(answer + stop, 1.0), (after, prompt_weight)]
        if index:
            parts.insert(0, (marker, prompt_weight))
        for part, weight in parts:
            ids = tokenizer.encode(part, add_special_tokens=False).ids if part else []
            row.tokens.extend(ids)
            row.weights.extend([weight] * len(ids))
    return row


def joined(rows: list[Row]) -> Row:
    """Several conversations as one long one."""
    return Row([t for row in rows for t in row.tokens], [w for row in rows for w in row.weights])


def batches(
    tokenizer: Tokenizer, seed: int, size: int, longest: int = 512, prompt_weight: float = 0.1, long_share: float = 0.0,
    weights: Mapping[str, float] = WEIGHTS,
) -> Iterator[Batch]:  # fmt: skip
    """Batches of about ``size`` tokens, in random order; a share of the rows joins several conversations."""
    source = stream(seed, weights)
    rng = random.Random(seed)
    pool = max(_LEAST_POOL, 16 * size // _TYPICAL_ROW)
    while True:
        rows: list[Row] = []
        while len(rows) < pool:
            count = rng.randint(3, 8) if rng.random() < long_share else 1
            row = joined([encode(next(source), tokenizer, prompt_weight) for _ in range(count)])
            if len(row.tokens) <= (longest if count == 1 else 4 * longest):
                rows.append(row)
        rows.sort(key=lambda row: len(row.tokens))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row.tokens) > size and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        groups = [group for group in groups if len(group) > 1]
        rng.shuffle(groups)
        for group in groups:
            yield collate(group)


def collate(rows: list[Row]) -> Batch:
    """One padded batch."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        weights[index, : len(row.tokens)] = torch.tensor(row.weights)
    return Batch(tokens, weights, sum(len(row.tokens) for row in rows))


@dataclass
class Stream(IterableDataset[Batch]):
    """`batches`, made by several processes at once, each with a seed of its own."""

    tokenizer: Path
    seed: int
    size: int
    longest: int = 512
    prompt_weight: float = 0.1
    long_share: float = 0.0
    shares: Mapping[str, float] = field(default_factory=lambda: WEIGHTS)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self.seed if worker is None else self.seed + 1_000_003 * worker.id
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        return batches(tokenizer, seed, self.size, self.longest, self.prompt_weight, self.long_share, self.shares)

    def loader(self, workers: int) -> Iterator[Batch]:
        """Batches without end; without workers they are made by this process, between steps."""
        ahead = 4 if workers else None
        return iter(DataLoader(self, batch_size=None, num_workers=workers, prefetch_factor=ahead))
