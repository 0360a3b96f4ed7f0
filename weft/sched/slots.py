"""`DecodeTable`: the numbers of running sequences as arrays, one entry per device slot.

Owns what a steady decode step needs, so that building it is arithmetic over arrays. Sequences copy their numbers in
when they begin to decode and are the truth again when they stop. Also the random numbers of sampling: a pure function
of a request's seed and the index of its output token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.core.step import F64, I32, I64, U32, U64, Bool
from weft.sched.masks import Ranges, visibility
from weft.sched.ragged import RowArrays
from weft.sched.sequence import GenerateOp

_MASK64 = (1 << 64) - 1
MAX_TOTAL = 2**31 - 1
"""Tokens of a sequence."""
_ONE, _GOLDEN = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Samplers(NamedTuple):
    """Sampling of n tokens, as in `SamplingBatch`."""

    uniforms: F64
    num_logprobs: I32
    suppress_stop: Bool
    late_mask: Bool


class DecodeTable:
    """Arrays over `num_slots` device slots; a row of `pages` is a sequence's page table."""

    def __init__(self, num_slots: int, max_pages: int):
        self.pages = np.zeros((num_slots, max_pages), np.int32)
        self.total = np.zeros(num_slots, np.int32)
        """Tokens of the sequence, those still on the device included. Every other number is fixed while a sequence
        decodes, but for `_states`: few arrays are written in a step."""
        self.room = np.zeros(num_slots, np.int32)
        """Up to this `total` the KV of the last token has a page that is the sequence's own; 0: the page written next
        may be shared, so make sure before writing."""
        self.end = np.zeros(num_slots, np.int32)
        """The `total` from which on nothing more is sampled."""
        self._least_end = np.zeros(num_slots, np.int32)
        """The `total` from which on a stop token ends the sequence."""
        self._states = np.zeros(num_slots, np.uint64)
        """Of splitmix64, for the output token sampled next."""
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.guided = np.zeros(num_slots, np.bool_)
        """Its tokens wait for a mask."""
        self.masked = np.zeros(num_slots, np.bool_)
        """Some of its tokens are hidden."""
        self.numbers = np.arange(num_slots, dtype=np.int32)
        """0, 1, ..., of which steps take slices. Never written."""
        self._places = np.arange(max_pages, dtype=np.int32)
        self._ones = np.ones(num_slots, np.int32)
        self._nothing = np.full(num_slots, -1, np.int32)
        self._visibility: U32 | None = None
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """How many slots no sequence runs in."""
        return len(self._free)

    @property
    def has_masked(self) -> bool:
        """Whether a sequence has hidden tokens, or had some."""
        return self._visibility is not None

    def take(self) -> int:
        """A free slot. The caller has checked `num_free`."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The slot's sequence no longer runs. The slot is free at once, without a fence: a step in flight may still
        sample into it, but that token is void by its epoch, and the next owner's `SlotSet` comes with a later step."""
        self.end[slot] = 0
        self._free.append(slot)

    def set_sampling(self, slot: int, op: GenerateOp, total: int) -> None:
        """Take over what sampling needs of an operation, whose sequence has `total` tokens."""
        start = total - op.num_output
        self.total[slot] = total
        self.end[slot] = start + op.max_tokens
        self._least_end[slot] = min(start + op.stop.min_tokens, MAX_TOTAL)
        self._states[slot] = _states(np.array([op.seed & _MASK64], np.uint64), np.array([op.num_output]))[0]
        self.num_logprobs[slot] = -1 if op.sampling.logprobs is None else op.sampling.logprobs
        self.guided[slot] = op.guide is not None

    def set_mask(self, slot: int, hidden: Ranges | None, page_size: int) -> None:
        """What the tokens that the slot computes do not see."""
        self.masked[slot] = bool(hidden)
        if hidden:
            if self._visibility is None:
                self._visibility = np.full(self.pages.shape, 0xFFFFFFFF, np.uint32)
            self._visibility[slot] = visibility(hidden, self.pages.shape[1], page_size)

    def rows(self, slots: I32, page_size: int) -> RowArrays:
        """One row for each of `slots` [n]: the token sampled last, over the slot's page table."""
        index = slots.astype(np.intp)  # as numpy wants it: other integers take five times as long
        count, kv_lens = len(slots), self.total[index]
        positions = kv_lens - 1
        last_pages, offsets = np.divmod(positions, page_size)
        num_pages = last_pages + 1
        leading = self._leading(num_pages)
        return RowArrays(
            token_ids=self._nothing[:count],
            token_slots=slots,
            positions=positions,
            write_slots=self.pages[index, last_pages] * page_size + offsets,
            q_lens=self._ones[:count],
            kv_lens=kv_lens,
            num_pages=num_pages,
            page_ids=self.pages[index, : leading.shape[1]][leading],
        )

    def words(self, slots: I32, num_pages: I32) -> U32:
        """Visibility words of the first `num_pages` [n] pages of each of `slots` [n], one after the other."""
        words = np.full((len(slots), num_pages.max()), 0xFFFFFFFF, np.uint32)
        if self._visibility is not None:
            masked = np.flatnonzero(self.masked[slots])
            words[masked] = self._visibility[slots[masked], : words.shape[1]]
        return words[self._leading(num_pages)]

    def sample(self, slots: I32) -> Samplers:
        """How each of `slots` [n] samples its next token. Counts the token."""
        index = slots.astype(np.intp)
        total, states = self.total[index], self._states[index]
        self.total[index] = total + 1
        self._states[index] = states + _GOLDEN
        return Samplers(
            uniforms=_draw(states),
            num_logprobs=self.num_logprobs[index],
            suppress_stop=total < self._least_end[index],
            late_mask=self.guided[index],
        )

    def _leading(self, num_pages: I32) -> Bool:
        """[n, m] which of the first m pages belong to each row, m being the most that one has."""
        return self._places[: np.maximum.reduce(num_pages)] < num_pages[:, None]

    def set_pages(self, slot: int, pages: list[int]) -> None:
        """Take over a page table, whose last page may be shared."""
        self.pages[slot, : len(pages)] = pages
        self.room[slot] = 0

    def set_own_page(self, slot: int, place: int, page: int, room: int) -> None:
        """`page`, at `place` of the page table, is the sequence's own, and its pages have room for `room` tokens."""
        self.pages[slot, place] = page
        self.room[slot] = room


def uniforms(seeds: U64, index: I64) -> F64:
    """Numbers in [0, 1) with 53 random bits: splitmix64 (Steele et al. 2014) over seed and output index, [n] -> [n]."""
    return _draw(_states(seeds, index))


def _states(seeds: U64, index: I64) -> U64:
    """[n] the states from which the numbers of outputs `index` [n] are drawn: one further is `_GOLDEN` more."""
    # Sums and products of arrays wrap around, without a word, as the algorithm wants it.
    return _mix(seeds) + (index.astype(np.uint64) + _ONE) * _GOLDEN


def _draw(states: U64) -> F64:
    return (_mix(states) >> _SHIFTS[3]).astype(np.float64) * 2.0**-53


def _mix(state: U64) -> U64:
    state = state ^ (state >> _SHIFTS[0])
    state *= _FACTORS[0]
    state ^= state >> _SHIFTS[1]
    state *= _FACTORS[1]
    state ^= state >> _SHIFTS[2]
    return state
