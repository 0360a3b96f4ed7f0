"""What a tensor must be for a kernel of the library to take it, and how the library sees a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels import shared_chunks
from weft.kernels.batch import AttentionBatch
from weft.kernels.cpu.library import BatchFields, Level
from weft.kernels.shared_chunks import SharedChunks

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
MAX_GROUP = 64
CHUNK, MAX_STACKED = 256, 16
"""`kChunk` and `kMaxStacked` of decode.h."""
PANEL = 32
"""Outputs, and inputs, that a packed weight takes at a time."""
THIN_ROWS = {
    (Level.AMX, torch.bfloat16): 128,
    (Level.AVX512, torch.bfloat16): 16,
    (Level.AVX512F, torch.bfloat16): 16,
    (Level.AVX2, torch.bfloat16): 16,
    (Level.AMX, torch.float32): 16,
    (Level.AVX512, torch.float32): 16,
    (Level.AVX512F, torch.float32): 16,
    (Level.AVX2, torch.float32): 8,
}
"""Products of up to so many rows with a weight that is not packed are ours: they read the weight once, where a
library's product rearranges it first. Measured against torch's product held to the same instructions; what is not
listed leaves it to torch. With a packed weight every product is ours."""


def thin_rows(level: Level, dtype: torch.dtype) -> int:
    """Up to how many rows of `dtype` the product with a weight that is not packed is ours."""
    return THIN_ROWS.get((level, dtype), 0)


def fits(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can read these: on the CPU, contiguous, one dtype that they know."""
    dtype = first.dtype
    if dtype not in DTYPES or not first.is_cpu or not first.is_contiguous():
        return False
    return all(t is None or (t.dtype == dtype and t.is_contiguous()) for t in others)


def is_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether this is a weight of `dtype`."""
    return weight.dtype == dtype and weight.is_contiguous()


def batch_fields(batch: AttentionBatch, max_queries: int = 0) -> BatchFields:
    """`batch` as the library reads it, made once per pass, with the chunks that rows of up to `max_queries` share.

    The tensors live as long as the batch.
    """
    key = (BatchFields, max_queries)
    found: BatchFields | None = batch.cache.get(key)
    if found is None:
        options = (batch.causal, batch.visibility, batch.mask_bits, batch.mask_indptr)
        chunks = shared_chunks.find(batch, CHUNK, max_queries)
        batch.cache[SharedChunks, max_queries] = chunks  # keeps its arrays
        found = batch.cache[key] = BatchFields(
            *(batch.num_rows, batch.num_tokens, batch.page_size),
            *(t.data_ptr() for t in (batch.q_indptr, batch.kv_indptr, batch.kv_page_ids, batch.kv_lens)),
            *(batch.positions.data_ptr(), batch.write_slots.data_ptr()),
            *(None if t is None else t.data_ptr() for t in options),
            *((0,) if chunks is None else (len(chunks.group_chunks), *(array.ctypes.data for array in chunks))),
        )
    return found
