"""The sampling state of sequences, one device slot each.

Owns, per slot: the parameters (host arrays, so that a steady step is arithmetic over them), the token last sampled,
token counts for penalties and the recent tokens that bad words are compared with (device, only for slots that need
them). `SlotSet` replaces a slot's state; `record` advances it on the device, without the host seeing a token. Does not
know logits; `edits` applies the state to them.

A slot keeps its state until its next `SlotSet`. `SlotSet.prompt` and `output` must be filled when the parameters have
penalties or bad words; a word that begins in the prompt counts as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.core.sampling import SamplingParams
from weft.core.step import F64, I32, Bool, SlotSet
from weft.worker.drawing import I64
from weft.worker.errors import StepError
from weft.worker.transfer import upload

IN_PROMPT = 1
"""Bit of a count that says the token is in the prompt; the rest counts the output in steps of `ONE_OUTPUT`."""
ONE_OUTPUT = 2


class Words(NamedTuple):
    """A slot's bad words, flat. The prefix of a word is all but its last token; N prefix tokens in all.

    A word is completed by `last` when, for each of its prefix tokens, the sequence's token `distance` from the end
    equals `token`.
    """

    last: I64
    """[words]"""
    word: I64
    """[N] whose prefix each token belongs to."""
    token: I64
    """[N]"""
    distance: I64
    """[N] 1: the token just before."""


class SlotTable:
    """The state of all slots. Used by one thread."""

    def __init__(self, num_slots: int, vocab_size: int, max_context: int, device: torch.device):
        """Empty slots; a slot must be set before it samples. Words longer than `max_context` tokens are ignored."""
        self.vocab_size = vocab_size
        self.device = device
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """[slots] the token last sampled."""
        self.is_set: Bool = np.zeros(num_slots, np.bool_)
        self.temperature: F64 = np.ones(num_slots)
        self.greedy: Bool = np.zeros(num_slots, np.bool_)
        self.top_k: I64 = np.zeros(num_slots, np.int64)
        self.top_p: F64 = np.ones(num_slots)
        self.min_p: F64 = np.zeros(num_slots)
        self.repetition: F64 = np.ones(num_slots)
        self.frequency: F64 = np.zeros(num_slots)
        self.presence: F64 = np.zeros(num_slots)
        self.penalized: Bool = np.zeros(num_slots, np.bool_)
        self.special: Bool = np.zeros(num_slots, np.bool_)
        """Slots with bias, allowed tokens or bad words."""
        self.stoppable: Bool = np.zeros(num_slots, np.bool_)
        """Slots with stop ids."""
        self.bias: dict[int, tuple[I64, F64]] = {}
        """Slot -> token ids and what is added to their logits."""
        self.allowed: dict[int, Tensor] = {}
        """Slot -> bool [V] on the device."""
        self.words: dict[int, Words] = {}
        self.stop_ids: dict[int, I64] = {}
        self.counts = RowPool(num_slots, vocab_size, torch.int32, device)
        """[V] per slot with penalties: `IN_PROMPT` and `ONE_OUTPUT` per output token."""
        self.recent = RowPool(num_slots, 0, torch.int64, device)
        """The last tokens of slots with bad words of several tokens, newest last; -1: there is none."""
        self._max_context = max_context

    def set(self, state: SlotSet) -> None:
        """Replace a slot's state. Raises `StepError` for tokens outside the vocabulary, but for stop ids."""
        slot, params = state.slot, state.params
        self.is_set[slot] = True
        self.temperature[slot] = params.temperature
        self.greedy[slot] = params.is_greedy
        self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.penalized[slot] = params.has_penalties
        self.special[slot] = bool(params.logit_bias or params.allowed_token_ids is not None or params.bad_words)
        self.stoppable[slot] = bool(state.stop_ids)
        self._forget(slot)
        if params.logit_bias:
            ids = self._checked(np.fromiter(params.logit_bias.keys(), np.int64))
            self.bias[slot] = ids, np.fromiter(params.logit_bias.values(), np.float64)
        if params.allowed_token_ids is not None:
            self.allowed[slot] = self._mask_of(params.allowed_token_ids)
        if state.stop_ids:
            stop_ids = np.unique(np.array(state.stop_ids, np.int64))
            # A model may name others as its end.
            self.stop_ids[slot] = stop_ids[(stop_ids >= 0) & (stop_ids < self.vocab_size)]
        if params.has_penalties or params.bad_words:
            self._set_history(slot, params, self._unpack(state.prompt), self._unpack(state.output))

    def record(self, slots: I32, tokens: Tensor) -> None:
        """Note `tokens` int64 [S] as sampled into `slots` [S], which are all different."""
        self.tokens.index_copy_(0, upload(slots, self.device, np.int64), tokens)
        counted = np.flatnonzero(self.counts.row_of_slot[slots] >= 0)
        if len(counted):
            rows = upload(self.counts.row_of_slot[slots[counted]], self.device)
            drawn = tokens[upload(counted, self.device)]
            cells = rows * self.vocab_size + drawn
            self.counts.data.view(-1).index_add_(0, cells, torch.full_like(cells, ONE_OUTPUT, dtype=torch.int32))
        followed = np.flatnonzero(self.recent.row_of_slot[slots] >= 0)
        if len(followed):
            rows = upload(self.recent.row_of_slot[slots[followed]], self.device)
            drawn = tokens[upload(followed, self.device)].unsqueeze(1)
            self.recent.data[rows] = torch.cat((self.recent.data[rows, 1:], drawn), dim=1)

    def _forget(self, slot: int) -> None:
        self.bias.pop(slot, None)
        self.allowed.pop(slot, None)
        self.words.pop(slot, None)
        self.stop_ids.pop(slot, None)
        self.counts.release(slot)
        self.recent.release(slot)

    def _set_history(self, slot: int, params: SamplingParams, prompt: I64, output: I64) -> None:
        if params.has_penalties:
            counts = np.bincount(output, minlength=self.vocab_size) * ONE_OUTPUT
            counts[prompt] |= IN_PROMPT
            self.counts.assign(slot, upload(counts, self.device, np.int32))
        words = [word for word in params.bad_words if len(word) <= self._max_context]
        if not words:
            return
        self.words[slot] = _flatten(words)
        self._checked(self.words[slot].last)
        longest = max(len(word) for word in words) - 1
        if longest:
            self.recent.widen(longest)
            tail = np.concatenate((prompt[-longest:], output[-longest:]))[-longest:]
            padded = np.full(self.recent.width, -1, np.int64)
            padded[len(padded) - len(tail) :] = tail
            self.recent.assign(slot, upload(padded, self.device))

    def _mask_of(self, ids: list[int]) -> Tensor:
        mask = np.zeros(self.vocab_size, np.bool_)
        mask[ids] = True
        return upload(mask, self.device)

    def _unpack(self, packed: bytes) -> I64:
        return self._checked(np.frombuffer(packed, np.int32).astype(np.int64))

    def _checked(self, tokens: I64) -> I64:
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise StepError(f"a SlotSet names tokens outside the vocabulary of {self.vocab_size}")
        return tokens


class RowPool:
    """Rows of a device tensor for the few slots that need one; grows by doubling."""

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device):
        self.data = torch.empty(0, width, dtype=dtype, device=device)
        """[rows, width]"""
        self.row_of_slot: I64 = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return self.data.shape[1]

    def assign(self, slot: int, values: Tensor) -> None:
        """Give `slot`, which has none, a row that holds `values` [width]."""
        if not self._free:
            old = self.data
            rows = max(4, 2 * old.shape[0])
            self.data = old.new_empty(min(rows, len(self.row_of_slot)), self.width)
            self.data[: old.shape[0]] = old
            self._free = list(range(self.data.shape[0] - 1, old.shape[0] - 1, -1))
        row = self._free.pop()
        self.data[row] = values
        self.row_of_slot[slot] = row

    def release(self, slot: int) -> None:
        """Take back the slot's row, if it has one."""
        row = int(self.row_of_slot[slot])
        if row >= 0:
            self._free.append(row)
            self.row_of_slot[slot] = -1

    def widen(self, width: int) -> None:
        """Make rows at least `width` wide: new elements are on the left and hold -1."""
        if width > self.width:
            wider = self.data.new_full((self.data.shape[0], width), -1)
            if self.width:
                wider[:, -self.width :] = self.data
            self.data = wider


def _flatten(words: list[list[int]]) -> Words:
    last = np.array([word[-1] for word in words], np.int64)
    flat = [
        (index, token, len(word) - 1 - position)
        for index, word in enumerate(words)
        for position, token in enumerate(word[:-1])
    ]
    columns = np.array(flat, np.int64).reshape(-1, 3).T
    return Words(last, columns[0], columns[1], columns[2])
