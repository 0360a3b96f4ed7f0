"""From output rows of logits to tokens.

Owns the order of application after `edits`: temperature, top-k, top-p, min-p, the draw. Works in blocks of rows, so
that memory stays bounded whatever the batch, and each row's token depends on its own row and state alone. Never waits
for the device.

Every random row is drawn from `exp((logit - largest) / temperature)`; a row whose logits hold NaN yields some token of
the vocabulary.

Shapes use: O output rows, S samplers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.core.step import I32, LateInputs, SamplingBatch
from weft.worker import edits
from weft.worker.edits import Masks, Rows
from weft.worker.errors import StepError
from weft.worker.selection import Selection, draw, selection_for
from weft.worker.slots import I64, SlotTable
from weft.worker.transfer import upload

HOST_BLOCK_ELEMENTS = 1 << 19
"""Logits of a block on a CPU: what stays in its cache."""
DEVICE_BLOCK_ELEMENTS = 1 << 25
"""Logits of a block on a GPU: enough to fill it, at 128 MiB for each intermediate result."""


class Sampler:
    """Draws the tokens of a step and records them in the slots."""

    def __init__(self, slots: SlotTable, selection: Selection | None = None, block_elements: int | None = None):
        """`selection` and `block_elements` default to what suits the slots' device."""
        on_host = slots.device.type == "cpu"
        self._slots = slots
        self._selection = selection or selection_for(slots.device)
        elements = block_elements or (HOST_BLOCK_ELEMENTS if on_host else DEVICE_BLOCK_ELEMENTS)
        self._block_rows = max(1, elements // slots.vocab_size)

    def sample(self, logits: Tensor, batch: SamplingBatch, late: LateInputs) -> Tensor:
        """logits [O, V] float32 or float64, kept -> tokens int64 [S].

        Raises `StepError` when a sampler's slot was never set, is used twice, or its late mask is missing.
        """
        rows, masks = self._resolve(batch, late)
        edited = edits.needs_edit(self._slots, rows)
        greedy = self._slots.greedy[rows.slots]
        tokens = torch.empty(len(rows.slots), dtype=torch.int64, device=logits.device)
        plain = np.flatnonzero(greedy & ~edited)
        if len(plain):
            _place(tokens, plain, self._selection.argmax(logits, batch.rows[plain].astype(np.int64)))
        for is_member in (greedy & edited, ~greedy & edited, ~greedy & ~edited):
            group = np.flatnonzero(is_member)
            for start in range(0, len(group), self._block_rows):
                chosen = group[start : start + self._block_rows]
                _place(tokens, chosen, self._sample_block(logits, batch, rows, masks, chosen))
        self._slots.record(rows.slots, tokens)
        return tokens

    def _resolve(self, batch: SamplingBatch, late: LateInputs) -> tuple[Rows, Masks | None]:
        if not self._slots.is_set[batch.slots].all():
            raise StepError("a sampler names a slot that no SlotSet has set")
        if len(np.unique(batch.slots)) != len(batch.slots):
            raise StepError("two samplers of a step share a slot")
        expected = np.flatnonzero(batch.late_mask)
        if not np.array_equal(np.sort(late.samplers), expected):
            given = late.samplers.tolist()
            raise StepError(f"samplers {expected.tolist()} wait for a late mask; masks came for {given}")
        mask_rows: I64 = np.full(len(batch.slots), -1, np.int64)
        rows = Rows(batch.slots, batch.suppress_stop, mask_rows)
        if not len(expected):
            return rows, None
        words = -(-self._slots.vocab_size // 32)
        if late.masks.shape != (len(expected), words):
            raise StepError(f"late masks are {late.masks.shape}, expected {(len(expected), words)} words")
        mask_rows[late.samplers] = np.arange(len(expected))
        return rows, Masks(late.masks, self._slots.vocab_size, self._slots.device)

    def _sample_block(
        self, logits: Tensor, batch: SamplingBatch, rows: Rows, masks: Masks | None, chosen: I64
    ) -> Tensor:
        """The tokens of samplers `chosen`, of which all or none are greedy, and all or none need edits."""
        x = logits.index_select(0, upload(batch.rows[chosen], logits.device))
        block = Rows(rows.slots[chosen], rows.suppress_stop[chosen], rows.mask_rows[chosen])
        edits.edit(x, self._slots, block, masks)
        if self._slots.greedy[block.slots[0]]:
            return self._selection.argmax(x, np.arange(len(chosen)))
        weights = self._weights(x, block.slots)
        return draw(weights, upload(batch.uniforms[chosen], x.device))

    def _weights(self, x: Tensor, ids: I32) -> Tensor:
        """Unnormalised probabilities after temperature, top-k, top-p and min-p, written over x [n, V]."""
        slots, keep = self._slots, self._selection
        # Clamped because -inf - -inf is NaN, in a row where the model gives every token -inf.
        largest = x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
        x.sub_(largest).div_(upload(slots.temperature[ids], x.device).to(x.dtype).unsqueeze(1))
        top_k, top_p, min_p = slots.top_k[ids], slots.top_p[ids], slots.min_p[ids]
        _with_rows(x, np.flatnonzero(top_k > 0), lambda part, index: keep.keep_top_k(part, top_k[index]))
        x.exp_()
        _with_rows(x, np.flatnonzero(top_p < 1), lambda part, index: keep.keep_top_p(part, top_p[index]))
        if (min_p > 0).any():
            # The largest weight is 1, so this is `min_p` of the most probable token.
            x.masked_fill_(x < upload(min_p, x.device).to(x.dtype).unsqueeze(1), 0.0)
        return x


def _with_rows(x: Tensor, index: I64, change: Callable[[Tensor, I64], None]) -> None:
    """Apply an in-place change to rows `index` of x, which need not be all of them."""
    if not len(index):
        return
    if len(index) == x.shape[0]:
        change(x, index)
        return
    on_device = upload(index, x.device)
    part = x.index_select(0, on_device)
    change(part, index)
    x.index_copy_(0, on_device, part)


def _place(tokens: Tensor, index: I64, found: Tensor) -> None:
    if len(index) == len(tokens):
        tokens.copy_(found)
    else:
        tokens.index_copy_(0, upload(index, tokens.device), found)
