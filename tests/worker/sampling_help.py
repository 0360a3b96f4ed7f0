"""Short ways to build sampling state and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams
from weft.core.step import LateInputs, SamplingBatch, SlotSet
from weft.kernels.cpu import library, ops
from weft.kernels.dispatch import host_sampling
from weft.worker.draw_device import DEVICE
from weft.worker.draw_host import host_drawing
from weft.worker.sampler import StepSampler
from weft.worker.slots import SlotTable

CPU = torch.device("cpu")


def ways() -> dict[str, dict[str, Any]]:
    """Options of `sample`, by name: each implementation of edits and draws that this machine has. That in C++ reads
    float32 alone."""
    found: dict[str, dict[str, Any]] = {
        "numpy": {"drawing": host_drawing(2), "kernels": None},
        "device": {"drawing": DEVICE, "kernels": None},
    }
    if isinstance(ops.best(), Exception):
        return found
    loaded = library.load()
    for level in library.levels(loaded):
        found[level.name.lower()] = {"kernels": ops.CpuKernels(loaded, level).sampling, "dtype": torch.float32}
    return found


def slot_set(slot: int, params: SamplingParams, prompt=(), output=(), stop_ids=()) -> SlotSet:
    return SlotSet(slot, params, pack_tokens(prompt), pack_tokens(output), list(stop_ids))


def sampling_batch(rows, slots, uniforms, **changes: Any) -> SamplingBatch:
    count = len(rows)
    fields: dict[str, Any] = {
        "rows": np.asarray(rows, np.int32),
        "slots": np.asarray(slots, np.int32),
        "uniforms": np.asarray(uniforms, np.float64),
        "num_logprobs": np.full(count, -1, np.int32),
        "suppress_stop": np.zeros(count, np.bool_),
        "late_mask": np.zeros(count, np.bool_),
    }
    return SamplingBatch(**{**fields, **changes})


def late_inputs(samplers, masks) -> LateInputs:
    """masks [M, V] bool."""
    return LateInputs(np.asarray(samplers, np.int32), pack_masks(np.asarray(masks)))


def pack_masks(masks: np.ndarray) -> np.ndarray:
    padded = np.pad(masks, ((0, 0), (0, -masks.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def table_of(*sets: SlotSet, vocab_size: int, num_slots: int = 512) -> SlotTable:
    table = SlotTable(num_slots, vocab_size, 4096, CPU)
    for state in sets:
        table.set(state)
    return table


def sample(
    table: SlotTable, logits: torch.Tensor, batch: SamplingBatch, late: LateInputs | None = None, dtype=None, **options
):
    """Tokens. `dtype`: of the logits, instead of their own."""
    options = {"kernels": host_sampling(), "threads": 2, **options}
    return StepSampler(table, **options).sample(logits.to(dtype or logits.dtype), batch, late or LateInputs()).tolist()
