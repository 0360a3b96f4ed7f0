"""Tokens on a CPU in C++: edits and draws of all samplers in one call, each row while it is in the cache.

See `edits` and `drawing` for what they mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.step import I32, SamplingBatch
from weft.kernels.cpu.sampling import SAMPLER, CpuSampling
from weft.worker.drawing import I64, SMALLEST
from weft.worker.edits import BANNED, FLOOR, LATE_MASKED, NOT_ALLOWED, LogitRows
from weft.worker.slots import SlotTable

_LEVELS = np.array([FLOOR, BANNED, NOT_ALLOWED, LATE_MASKED, SMALLEST], np.float32)


def sample(
    kernels: CpuSampling,
    logits: Tensor,
    batch: SamplingBatch,
    slots: SlotTable,
    rows: LogitRows,
    masks: npt.NDArray[np.uint32],
    threads: int,
) -> Tensor:
    """logits [O, V] that `kernels` fits, late masks [M, ceil(V / 32)] -> tokens int64 [S], as `StepSampler.sample`."""
    ids = rows.slots
    table = np.zeros(len(ids), SAMPLER)
    table["logits"] = logits.data_ptr() + _offsets(batch.rows, logits)
    table["temperature"] = np.where(slots.greedy[ids], 0.0, slots.temperature[ids])
    table["uniform"] = batch.uniforms
    for name in ("top_k", "top_p", "min_p", "repetition", "frequency", "presence"):
        table[name] = getattr(slots, name)[ids]
    penalized = np.flatnonzero(slots.penalized[ids])
    if len(penalized):
        counts = slots.counts
        table["counts"][penalized] = counts.data.data_ptr() + _offsets(counts.row_of_slot[ids[penalized]], counts.data)
    masked = np.flatnonzero(rows.mask_rows >= 0)
    masks = np.ascontiguousarray(masks)
    table["late"][masked] = masks.ctypes.data + rows.mask_rows[masked] * masks.strides[0]
    bans = []  # keeps what the table points to
    for index in np.flatnonzero(slots.special[ids] | (rows.suppress_stop & slots.stoppable[ids])).tolist():
        slot, sampler = int(ids[index]), table[index]
        if slot in slots.bias:
            biased, bias = slots.bias[slot]
            sampler["bias_ids"], sampler["bias"] = biased.ctypes.data, bias.ctypes.data
            sampler["num_bias"] = len(biased)
        if slot in slots.allowed:
            sampler["allowed"] = slots.allowed[slot].data_ptr()
        bans.append(_banned(slots, slot, suppress_stop=bool(rows.suppress_stop[index])))
        sampler["bans"], sampler["num_bans"] = bans[-1].ctypes.data, len(bans[-1])
    kernels.sample(table, slots.vocab_size, _LEVELS, threads)
    return torch.from_numpy(table["token"].copy())


def _offsets(rows: I32 | I64, data: Tensor) -> I64:
    """Where rows of a contiguous tensor begin, in bytes."""
    return rows.astype(np.int64) * (data.shape[1] * data.element_size())


def _banned(slots: SlotTable, slot: int, *, suppress_stop: bool) -> I64:
    """The stop ids and the last tokens of words that must not be sampled now."""
    found = [slots.stop_ids[slot]] if suppress_stop and slot in slots.stop_ids else []
    if slot in slots.words:
        words = slots.words[slot]
        follows = np.ones(len(words.last), np.bool_)
        if len(words.word):
            recent = slots.recent.data[int(slots.recent.row_of_slot[slot])].numpy()
            follows[words.word[recent[len(recent) - words.distance] != words.token]] = False
        found.append(words.last[follows])
    return np.concatenate(found) if found else np.empty(0, np.int64)
