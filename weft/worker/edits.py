"""What sampling parameters do to logits before temperature: bias, penalties, and tokens that must not be sampled.

Owns the order of these and the meaning of contradictions. Does not draw and changes no state.

Masks are not -inf but three finite levels, far below any logit and far apart. So a row in which masks leave nothing
has a defined outcome, on the device, at no cost: the weakest masks lose first. Stop ids and bad words give way to
allowed tokens, these to a late mask (a grammar's output stays valid), and a token that the model itself gives -inf is
still preferred to a masked one. Among tokens of the same level each is as probable as the other.

Shapes use: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.step import I32, Bool
from weft.worker.drawing import I64
from weft.worker.slots import IN_PROMPT, SlotTable
from weft.worker.transfer import upload, upload_all

FLOOR = -1e24
"""What a logit of -inf or NaN becomes in rows with masks. Any level divided by the smallest temperature is finite."""
BANNED = -1e26
"""Stop ids that are suppressed, and tokens that complete a bad word."""
NOT_ALLOWED = -1e28
"""Tokens not in `allowed_token_ids`."""
LATE_MASKED = -1e30
"""Tokens that the late mask excludes."""


class LogitRows(NamedTuple):
    """The samplers that rows of logits belong to."""

    slots: I32
    """[n]"""
    suppress_stop: Bool
    """[n]"""
    mask_rows: I64
    """[n] row of the step's late masks; -1: none."""


class Masks:
    """Late masks on the device, as they came: packed."""

    def __init__(self, packed: npt.NDArray[np.uint32], vocab_size: int, device: torch.device):
        """packed [M, ceil(V / 32)], bit v % 32 of word v // 32."""
        octets = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
        self._octets = upload(octets, device)
        self._vocab_size = vocab_size

    def unpack(self, rows: Tensor) -> Tensor:
        """int64 [n] -> bool [n, V]."""
        octets = self._octets.index_select(0, rows)
        shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
        bits = (octets.unsqueeze(2) >> shifts) & 1
        return bits.flatten(1)[:, : self._vocab_size].bool()


def needs_edit(slots: SlotTable, rows: LogitRows) -> Bool:
    """[n] whether `edit` would change a row."""
    ids = rows.slots
    stopped = rows.suppress_stop & slots.stoppable[ids]
    needed: Bool = slots.penalized[ids] | slots.special[ids] | stopped | (rows.mask_rows >= 0)
    return needed


def edit(logits: Tensor, slots: SlotTable, rows: LogitRows, masks: Masks | None) -> None:
    """Apply everything up to temperature to logits [n, V], in place."""
    _add_bias(logits, slots, rows)
    _penalize(logits, slots, rows)
    # Masking last is the same as masking first, and keeps the levels apart from what bias and penalties do to them.
    _mask(logits, slots, rows, masks)


def _add_bias(logits: Tensor, slots: SlotTable, rows: LogitRows) -> None:
    found = [(index, slots.bias[slot]) for index, slot in enumerate(rows.slots.tolist()) if slot in slots.bias]
    if not found:
        return
    cells = np.concatenate([index * slots.vocab_size + ids for index, (ids, _) in found])
    values = np.concatenate([bias for _, (_, bias) in found])
    index, added = upload_all((cells, values), logits.device)
    logits.view(-1).index_add_(0, index, added.to(logits.dtype))


def _penalize(logits: Tensor, slots: SlotTable, rows: LogitRows) -> None:
    chosen = np.flatnonzero(slots.penalized[rows.slots])
    if not len(chosen):
        return
    if logits.device.type == "cpu":
        for row in chosen.tolist():
            _penalize_row(logits[row].numpy(), slots, int(rows.slots[row]))
        return
    ids = rows.slots[chosen]
    per_row = np.stack((slots.repetition[ids], slots.frequency[ids], slots.presence[ids]))
    index, count_rows, per_row_there = upload_all((chosen, slots.counts.row_of_slot[ids], per_row), logits.device)
    counts = slots.counts.data.index_select(0, count_rows)
    x = logits.index_select(0, index)
    repetition, frequency, presence = per_row_there.to(logits.dtype).unsqueeze(2)
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    num_output = counts >> IN_PROMPT.bit_length()
    x -= frequency * num_output + presence * (num_output > 0)
    logits.index_copy_(0, index, x)


def _penalize_row(row: npt.NDArray[np.floating], slots: SlotTable, slot: int) -> None:
    """On a CPU only the tokens that were seen are touched, which are few."""
    counts = slots.counts.data[int(slots.counts.row_of_slot[slot])].numpy()
    seen = np.flatnonzero(counts)
    x = row[seen]
    repetition = x.dtype.type(slots.repetition[slot])
    num_output = counts[seen] >> IN_PROMPT.bit_length()
    with np.errstate(over="ignore"):  # infinite is a defined outcome
        x = np.where(x > 0, x / repetition, x * repetition)
    row[seen] = x - (slots.frequency[slot] * num_output + slots.presence[slot] * (num_output > 0)).astype(x.dtype)


def _mask(logits: Tensor, slots: SlotTable, rows: LogitRows, masks: Masks | None) -> None:
    bans = _bans(logits, slots, rows)
    allowed = [(index, slots.allowed[slot]) for index, slot in enumerate(rows.slots.tolist()) if slot in slots.allowed]
    late = np.flatnonzero(rows.mask_rows >= 0)
    if bans is None and not allowed and not len(late):
        return
    torch.nan_to_num_(logits, nan=FLOOR, neginf=FLOOR)
    if bans is not None:
        cells, levels = bans
        logits.view(-1).scatter_reduce_(0, cells, levels, "amin")
    if allowed:
        index = upload(np.array([i for i, _ in allowed]), logits.device)
        mask = torch.stack([m for _, m in allowed])
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~mask, NOT_ALLOWED))
    if len(late) and masks is not None:
        index, mask_rows = upload_all((late, rows.mask_rows[late]), logits.device)
        mask = masks.unpack(mask_rows)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~mask, LATE_MASKED))


def _bans(logits: Tensor, slots: SlotTable, rows: LogitRows) -> tuple[Tensor, Tensor] | None:
    """Cells of the flat logits, and the level that each is lowered to: +inf for words whose prefix does not match."""
    stops: list[I64] = []
    lasts: list[I64] = []
    prefixes: list[I64] = []
    num_words = 0
    width = slots.recent.width
    for index, slot in enumerate(rows.slots.tolist()):
        if rows.suppress_stop[index] and slot in slots.stop_ids:
            stops.append(index * slots.vocab_size + slots.stop_ids[slot])
        if slot in slots.words:
            words = slots.words[slot]
            lasts.append(index * slots.vocab_size + words.last)
            if len(words.word):
                cells = (slots.recent.row_of_slot[slot] + 1) * width - words.distance
                prefixes.append(np.stack((words.word + num_words, words.token, cells)))
            num_words += len(words.last)
    if not stops and not lasts:
        return None
    device = logits.device
    flat = np.concatenate(prefixes, axis=1) if prefixes else np.empty((3, 0), np.int64)
    banned, (word, token, cell) = upload_all((np.concatenate(stops + lasts), flat), device)
    mismatches = torch.zeros(num_words, dtype=torch.int32, device=device)
    if prefixes:
        mismatches.index_add_(0, word, (slots.recent.data.view(-1)[cell] != token).int())
    always = sum(map(len, stops))
    levels = torch.full((always + num_words,), BANNED, dtype=logits.dtype, device=device)
    levels[always:].masked_fill_(mismatches > 0, torch.inf)
    return banned, levels
