"""From output rows of logits to tokens.

Owns who is sampled how. On a CPU with kernels, `sample_host` does all of it. Elsewhere greedy rows take one argmax,
random ones `drawing`, and those whose logits must be edited first (bias, penalties, masks) a copy, in blocks, so that
memory is bounded for every size of batch. Never waits for the device.

Shapes use: O output rows, S samplers, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.step import I32, LateInputs, SamplingBatch
from weft.kernels.cpu.sampling import CpuSampling
from weft.worker import edits, sample_host
from weft.worker.draw_device import DEVICE
from weft.worker.draw_host import host_drawing
from weft.worker.drawing import I64, Drawing, Draws
from weft.worker.edits import LogitRows, Masks
from weft.worker.errors import StepError
from weft.worker.slots import SlotTable
from weft.worker.transfer import upload

HOST_BLOCK_ELEMENTS = 1 << 19
"""Edited logits of a block on a CPU: what stays in its cache."""
DEVICE_BLOCK_ELEMENTS = 1 << 25


class StepSampler:
    """Draws the tokens of a step and records them in the slots."""

    def __init__(
        self,
        slots: SlotTable,
        *,
        threads: int = 1,
        kernels: CpuSampling | None = None,
        drawing: Drawing | None = None,
        block_elements: int | None = None,
    ):
        """`kernels`, if any, are used for logits that they read. `drawing` and `block_elements` default to what suits
        the slots' device; `threads` are those of a CPU."""
        on_host = slots.device.type == "cpu"
        self._slots = slots
        self._kernels = kernels
        self._threads = threads
        self._drawing = drawing or (host_drawing(threads) if on_host else DEVICE)
        elements = block_elements or (HOST_BLOCK_ELEMENTS if on_host else DEVICE_BLOCK_ELEMENTS)
        self._block_rows = max(1, elements // slots.vocab_size)

    def sample(self, logits: Tensor, batch: SamplingBatch, late: LateInputs) -> Tensor:
        """logits [O, V] float32 or float64, kept -> tokens int64 [S]; -1 for a sampler whose row has no finite largest
        logit, which is also so when one of them is NaN.

        Raises `StepError` when a sampler's slot was never set, is used twice, or its late mask is missing.
        """
        rows = self._resolve(batch, late)
        if self._kernels is not None and self._kernels.fits(logits):
            tokens = sample_host.sample(self._kernels, logits, batch, self._slots, rows, late.masks, self._threads)
            self._slots.record(rows.slots, tokens.clamp(min=0))
            return tokens
        masks = Masks(late.masks, self._slots.vocab_size, self._slots.device) if len(late.samplers) else None
        edited = edits.needs_edit(self._slots, rows)
        tokens = torch.zeros(len(rows.slots), dtype=torch.int64, device=logits.device)
        self._choose(logits, batch.rows, batch, np.flatnonzero(~edited), tokens)
        finite = _are_finite(logits, batch.rows, tokens)
        index = np.flatnonzero(edited)
        for start in range(0, len(index), self._block_rows):
            chosen = index[start : start + self._block_rows]
            x = logits.index_select(0, upload(batch.rows[chosen], logits.device))
            # Edits hide what is not a number behind finite levels.
            _place(finite, chosen, x.amax(-1).isfinite())
            block = LogitRows(rows.slots[chosen], rows.suppress_stop[chosen], rows.mask_rows[chosen])
            edits.edit(x, self._slots, block, masks)
            row_of = np.zeros(len(rows.slots), np.int64)
            row_of[chosen] = np.arange(len(chosen))
            self._choose(x, row_of, batch, chosen, tokens)
        self._slots.record(rows.slots, tokens)
        return torch.where(finite, tokens, -1)

    def _choose(self, logits: Tensor, row_of: I32 | I64, batch: SamplingBatch, samplers: I64, tokens: Tensor) -> None:
        """Sample from finished logits. `row_of` [S] is the row of each sampler, `samplers` are those to do."""
        slots = self._slots
        is_greedy = slots.greedy[batch.slots[samplers]]
        greedy, random = samplers[is_greedy], samplers[~is_greedy]
        if len(greedy):
            _place(tokens, greedy, self._drawing.argmax(logits, row_of[greedy].astype(np.int64)))
        if len(random):
            ids = batch.slots[random]
            how = (slots.temperature[ids], slots.top_k[ids], slots.top_p[ids], slots.min_p[ids])
            draws = Draws(*how, batch.uniforms[random])
            _place(tokens, random, self._drawing.draw(logits, row_of[random].astype(np.int64), draws))

    def _resolve(self, batch: SamplingBatch, late: LateInputs) -> LogitRows:
        if not self._slots.is_set[batch.slots].all():
            raise StepError("a sampler names a slot that no SlotSet has set")
        if len(np.unique(batch.slots)) != len(batch.slots):
            raise StepError("two samplers of a step share a slot")
        expected = np.flatnonzero(batch.late_mask)
        masked = len(late.samplers)
        if not np.array_equal(np.sort(np.concatenate((late.samplers, late.free))), expected):
            given = [*late.samplers.tolist(), *late.free.tolist()]
            raise StepError(f"samplers {expected.tolist()} wait for a late mask; masks came for {given}")
        mask_rows: I64 = np.full(len(batch.slots), -1, np.int64)
        rows = LogitRows(batch.slots, batch.suppress_stop, mask_rows)
        if not masked:
            return rows
        words = -(-self._slots.vocab_size // 32)
        if late.masks.shape != (masked, words):
            raise StepError(f"late masks are {late.masks.shape}, expected {(masked, words)} words")
        mask_rows[late.samplers] = np.arange(masked)
        return rows


def _are_finite(logits: Tensor, rows: I32, tokens: Tensor) -> Tensor:
    """Whether each sampled token's own logit [S] is finite. In a row that was not edited, that says whether the row's
    largest is: `Drawing` gives the argmax of a row without a finite largest, and torch and numpy take NaN for the
    largest. So no pass over the row is needed."""
    if len(rows) == logits.shape[0] and (rows == np.arange(len(rows))).all():
        chosen = logits.gather(1, tokens.unsqueeze(1))
    else:
        chosen = logits[upload(rows, logits.device, np.int64), tokens].unsqueeze(1)
    return chosen.squeeze(1).isfinite()


def _place(tokens: Tensor, index: I64, found: Tensor) -> None:
    if len(index) == len(tokens):
        tokens.copy_(found)
    else:
        tokens.index_copy_(0, upload(index, tokens.device), found)
