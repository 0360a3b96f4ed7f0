"""Turning examples into token batches: assistant tokens carry the loss, rows of similar length share a batch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.weft_tiny.curriculum import Curriculum
from training.weft_tiny.data import WEIGHTS, stream
from training.weft_tiny.examples import Example
from training.weft_tiny.noise import KINDS as NOISY
from training.weft_tiny.noise import noisy
from training.weft_tiny.render import render

_LEAST_POOL = 2000
"""Rows that are made before they are sorted by length."""
_TYPICAL_ROW = 150
"""Approximate number of tokens of a conversation."""
_REUSED_AFTER = 400
"""Batches that are kept before one of them comes again."""
_KEPT_TARGETS = 0.25
"""Share of the targets outside answers that a batch keeps."""


@dataclass(frozen=True)
class Row:
    """The tokens of one conversation, the weight of each as a target, and the kind and level they come from."""

    tokens: list[int]
    weights: list[float]
    source: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right; ``weights`` is zero wherever a token is not a target.

    ``tokens`` and ``weights`` are (rows, width). ``answers`` is (answers, 3): the row of each answer, its first token
    and the one after its last. ``sources`` has the kind and level of each row, ``size`` counts tokens without padding.
    """

    tokens: Tensor
    weights: Tensor
    answers: Tensor
    size: int
    sources: tuple[tuple[str, int], ...] = ()


def encode(example: Example, tokenizer: Tokenizer, prompt_weight: float) -> Row:
    """Tokenize a conversation turn by turn; assistant turns weigh 1, the rest ``prompt_weight``."""
    if example.kind == "raw":
        return _raw(example, tokenizer)
    text = render(example.messages, example.tools)
    marker, end = "<|im_start|>assistant\n", "<|im_end|>"
    row = Row([], [], (example.kind, example.level))
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


def _raw(example: Example, tokenizer: Tokenizer) -> Row:
    """Text without the chat template; all of it is a target. What a prompt would have is tokenized for itself: a prompt
    may end with a mark that is one token with the space after it."""
    parts = [tokenizer.encode(message["content"], add_special_tokens=False).ids for message in example.messages]
    tokens = [*(token for part in parts for token in part), tokenizer.token_to_id("<|endoftext|>")]
    return Row(tokens, [1.0] * len(tokens), (example.kind, example.level))


def joined(rows: list[Row]) -> Row:
    """Join several conversations into one. Its source is unset, because it is harder than each of them alone."""
    if len(rows) == 1:
        return rows[0]
    return Row([t for row in rows for t in row.tokens], [w for row in rows for w in row.weights])


def thinned(row: Row, rng: random.Random) -> Row:
    """The row with a random quarter of its targets outside answers, at four times their weight.

    The expected loss stays the same; the matrix products with the embedding cost a third as much.
    """
    weights = [w if w == 1.0 else (w / _KEPT_TARGETS if rng.random() < _KEPT_TARGETS else 0.0) for w in row.weights]
    return Row(row.tokens, weights, row.source)


def batches(
    tokenizer: Tokenizer, seed: int, size: int, longest: int = 512, prompt_weight: float = 0.1, long_share: float = 0.0,
    weights: Mapping[str, float] = WEIGHTS, curriculum: Curriculum | None = None, noise: float = 0.0,
) -> Iterator[Batch]:  # fmt: skip
    """Batches of about ``size`` tokens, in random order; a share of the rows joins several conversations, and a share
    ``noise`` of the conversations has noisy prompts."""
    source = stream(seed, weights, curriculum)
    rng = random.Random(seed)
    pool = max(_LEAST_POOL, 16 * size // _TYPICAL_ROW)
    while True:
        rows: list[Row] = []
        while len(rows) < pool:
            count = rng.randint(3, 8) if rng.random() < long_share else 1
            drawn = [next(source) for _ in range(count)]
            drawn = [noisy(one, rng) if one.kind in NOISY and rng.random() < noise else one for one in drawn]
            row = joined([encode(one, tokenizer, prompt_weight) for one in drawn])
            if len(row.tokens) <= (longest if count == 1 else 4 * longest):
                rows.append(thinned(row, rng))
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
    """Combine examples into one padded batch."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        weights[index, : len(row.tokens)] = torch.tensor(row.weights)
    answers = torch.tensor([(index, *span) for index, row in enumerate(rows) for span in answers_of(row)])
    size = sum(len(row.tokens) for row in rows)
    return Batch(tokens, weights, answers, size, tuple(row.source for row in rows))


def answers_of(row: Row) -> Iterator[tuple[int, int]]:
    """The first token of every answer of the row, and the one after its last: runs of weight 1."""
    place = 0
    for whole, run in groupby(row.weights, lambda weight: weight == 1.0):
        end = place + sum(1 for _ in run)
        if whole:
            yield place, end
        place = end


def reused(fresh: Iterable[Batch], uses: int, seed: int, after: int = _REUSED_AFTER) -> Iterator[Batch]:
    """Yield every batch ``uses`` times: when it is made, and again among later ones, in random order. Up to ``after``
    batches are kept for that, and do not come again if the stream is left.

    A batch that comes again has no sources: its answers do not say how well a level is learned.
    """
    rng, kept = random.Random(seed), list[Batch]()
    for batch in fresh:
        yield batch
        kept += [replace(batch, sources=(("", 0),) * len(batch.sources))] * (uses - 1)
        while len(kept) > after * (uses - 1):
            place = rng.randrange(len(kept))
            kept[place], kept[-1] = kept[-1], kept[place]
            yield kept.pop()


@dataclass
class Stream(IterableDataset[Batch]):
    """Yield `batches` that several processes make in parallel, each with its own seed."""

    tokenizer: Path
    seed: int
    size: int
    longest: int = 512
    prompt_weight: float = 0.1
    long_share: float = 0.0
    shares: Mapping[str, float] = field(default_factory=lambda: WEIGHTS)
    curriculum: Curriculum | None = None
    noise: float = 0.0

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None:
            os.setpgrp()  # a signal to the trainer's group of processes is the trainer's to handle
        seed = self.seed if worker is None else self.seed + 1_000_003 * worker.id
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        return batches(tokenizer, seed, self.size, self.longest, self.prompt_weight, self.long_share, self.shares,
                       self.curriculum, self.noise)  # fmt: skip

    def loader(self, workers: int) -> Iterator[Batch]:
        """Yield batches without end. Without workers, this process makes them between steps."""
        ahead = 4 if workers else None
        # File descriptors are handed over by a thread of the worker, which waits tens of milliseconds for its turn.
        torch.multiprocessing.set_sharing_strategy("file_system")
        return iter(DataLoader(self, batch_size=None, num_workers=workers, prefetch_factor=ahead))
