"""Random ragged batches over scattered pages, for comparing kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.core.step import ForwardBatch
from weft.kernels.batch import AttentionBatch, lower


@dataclass(frozen=True)
class Case:
    """A batch, its KV, and queries."""

    forward: ForwardBatch
    batch: AttentionBatch
    kv: Tensor
    q: Tensor


def random_case(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    visibility: bool = False,
    masks: bool = False,
    unwritten: bool = False,
) -> Case:
    """Rows are (queries, entries). Slots of no row hold NaN; with options, each row draws whether it uses them."""
    pages_of = [-(-k // page_size) for _, k in rows]
    num_pages = sum(pages_of) + 3
    kv = torch.full((num_pages, 2, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    free = rng.permutation(num_pages).tolist()
    pages = [[free.pop() for _ in range(n)] for n in pages_of]
    positions, slots = [], []
    for (q, k), row_pages in zip(rows, pages, strict=True):
        for s in range(k):
            values = torch.from_numpy(rng.standard_normal((2, kv_heads, head_dim))).to(dtype)
            kv[row_pages[s // page_size], :, :, s % page_size] = values
        for s in range(k - q, k):
            positions.append(max(s, 0))
            skipped = s < 0 or (unwritten and rng.random() < 0.3)
            slots.append(-1 if skipped else row_pages[s // page_size] * page_size + s % page_size)
    options = _options(rng, rows, pages_of, page_size, causal, visibility, masks)
    forward = ForwardBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        write_slots=np.array(slots, np.int32),
        q_indptr=np.cumsum([0, *(q for q, _ in rows)]).astype(np.int32),
        kv_indptr=np.cumsum([0, *pages_of]).astype(np.int32),
        kv_page_ids=np.array([p for row in pages for p in row], np.int32),
        kv_lens=np.array([k for _, k in rows], np.int32),
        **options,
    )
    q = torch.from_numpy(rng.standard_normal((len(positions), heads, head_dim))).to(dtype)
    return Case(forward, lower(forward, page_size), kv, q)


def _options(rng, rows, pages_of, page_size, causal, visibility, masks):
    options = {}
    if not causal:
        options["causal"] = rng.random(len(rows)) < 0.5
    if visibility:
        words = rng.integers(0, 2**32, sum(pages_of), dtype=np.uint32)
        words[rng.random(len(words)) < 0.5] = 0xFFFFFFFF
        options["visibility"] = words
    if masks:
        parts, indptr = [], [0]
        for q, k in rows:
            size = q * -(-k // 8) if rng.random() < 0.6 else 0
            parts.append(rng.integers(0, 256, size, dtype=np.uint8))
            indptr.append(indptr[-1] + size)
        options |= {"mask_bits": np.concatenate(parts), "mask_indptr": np.array(indptr, np.int32)}
    return options


def sees(case: Case, row: int, query: int, entry: int, window: int | None) -> bool:
    """The rules of `ForwardBatch`, word by word."""
    f = case.forward
    q = int(f.q_indptr[row + 1] - f.q_indptr[row])
    k, page_size = int(f.kv_lens[row]), case.batch.page_size
    if entry >= k:
        return False
    if (f.causal is None or f.causal[row]) and not entry <= k - q + query:
        return False
    if f.visibility is not None:
        word = int(f.visibility[f.kv_indptr[row] + entry // page_size])
        if not word >> (entry % page_size) & 1:
            return False
    if f.mask_bits is not None and f.mask_indptr[row + 1] > f.mask_indptr[row]:
        bits = query * -(-k // 8) * 8 + entry
        if not int(f.mask_bits[f.mask_indptr[row] + bits // 8]) >> (bits % 8) & 1:
            return False
    return window is None or int(f.positions[f.q_indptr[row] + query]) - entry < window


def literal_attention(case: Case, scale: float, window: int | None) -> np.ndarray:
    """Attention one query, head and entry at a time in float64."""
    f, kv, q = case.forward, case.kv.double().numpy(), case.q.double().numpy()
    out = np.zeros_like(q)
    group = q.shape[1] // kv.shape[2]
    for row in range(f.num_rows):
        pages = f.kv_page_ids[f.kv_indptr[row] : f.kv_indptr[row + 1]]
        for token in range(f.q_indptr[row], f.q_indptr[row + 1]):
            seen = [s for s in range(f.kv_lens[row]) if sees(case, row, token - f.q_indptr[row], s, window)]
            if not seen:
                continue
            for head in range(q.shape[1]):
                k, v = (
                    np.stack(
                        [kv[pages[s // case.batch.page_size], i, head // group, s % case.batch.page_size] for s in seen]
                    )
                    for i in (0, 1)
                )
                scores = k @ q[token, head] * scale
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v / weights.sum()
    return out.reshape(len(out), -1)
