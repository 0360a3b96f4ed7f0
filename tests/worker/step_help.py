"""Short ways to write steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.worker.sampling_help import sampling_batch
from weft.core.protocols import Worker
from weft.core.sampling import SamplingParams
from weft.core.step import ForwardBatch, LateInputs, SlotSet, Step, StepResult

GREEDY = SamplingParams(temperature=0.0)
_ids = itertools.count(1)


def ints(values: Sequence[Any]) -> np.ndarray:
    return np.asarray(values, np.int32)


def forward(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], page_size: int = 8, **options: Any
) -> ForwardBatch:
    """Rows of (tokens, KV entries before them, page ids), with an output row for the last token of each."""
    tokens, positions, slots, pages = [], [], [], []
    q_indptr, kv_indptr, kv_lens = [0], [0], []
    for row_tokens, before, row_pages in rows:
        after = before + len(row_tokens)
        tokens += list(row_tokens)
        positions += range(before, after)
        slots += [row_pages[p // page_size] * page_size + p % page_size for p in range(before, after)]
        pages += list(row_pages[: -(-after // page_size)])
        q_indptr.append(len(tokens))
        kv_indptr.append(len(pages))
        kv_lens.append(after)
    fields = {
        "token_ids": ints(tokens),
        "positions": ints(positions),
        "write_slots": ints(slots),
        "q_indptr": ints(q_indptr),
        "kv_indptr": ints(kv_indptr),
        "kv_page_ids": ints(pages),
        "kv_lens": ints(kv_lens),
        "output_tokens": ints(q_indptr[1:]) - 1,
    }
    return ForwardBatch(**{**fields, **options})


def step(**fields: Any) -> Step:
    return Step(next(_ids), **fields)


def dist(rows: Sequence[int], top: int):
    """No samplers, only the distributions of `rows`."""
    return sampling_batch([], [], [], dist_rows=ints(rows), dist_top=top)


def greedy(rows: Sequence[int], slots: Sequence[int], **options: Any):
    return sampling_batch(rows, slots, [0.0] * len(rows), **options)


def set_slots(*slots: int, params: SamplingParams = GREEDY) -> list[SlotSet]:
    return [SlotSet(slot, params) for slot in slots]


def run(worker: Worker, one: Step, late: LateInputs | None = None) -> StepResult:
    handle = worker.launch(one)
    worker.bind(handle, late or LateInputs())
    return handle.wait()
