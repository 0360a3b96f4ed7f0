"""`DecodeTable`: the numbers of running sequences as arrays, one entry per device slot.

Owns what a steady decode step needs, so that building it is arithmetic over arrays. Sequences copy their numbers in
when they begin to decode and are the truth again when they stop. Also the random numbers of sampling: a pure function
of a request's seed and the index of its output token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.core.step import I32, U32
from weft.sched.masks import Ranges, visibility
from weft.sched.ragged import RowArrays
from weft.sched.sequence import GenerateOp

_MASK64 = (1 << 64) - 1
_ONE, _GOLDEN = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class DecodeTable:
    """Arrays over `num_slots` device slots; a row of `pages` is a sequence's page table."""

    def __init__(self, num_slots: int, max_pages: int):
        self.pages = np.zeros((num_slots, max_pages), np.int32)
        self.num_pages = np.zeros(num_slots, np.int32)
        self.total = np.zeros(num_slots, np.int32)
        """Tokens of the sequence, those still on the device included."""
        self.remaining = np.zeros(num_slots, np.int32)
        """Tokens that may still be sampled."""
        self.must_own = np.zeros(num_slots, np.bool_)
        """The page written next may be shared: make sure before writing."""
        self.seeds = np.zeros(num_slots, np.uint64)
        self.output_index = np.zeros(num_slots, np.int64)
        """Index of the output token sampled next."""
        self.min_tokens = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.guided = np.zeros(num_slots, np.bool_)
        """Its tokens wait for a mask."""
        self.masked = np.zeros(num_slots, np.bool_)
        """Some of its tokens are hidden."""
        self.numbers = np.arange(num_slots, dtype=np.int32)
        """0, 1, ..., of which steps take slices. Never written."""
        self._ones = np.ones(num_slots, np.int32)
        self._nothing = np.full(num_slots, -1, np.int32)
        self._visibility: U32 | None = None
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """How many slots no sequence runs in."""
        return len(self._free)

    def take(self) -> int:
        """A free slot. The caller has checked `num_free`."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The slot's sequence no longer runs. The slot is free at once, without a fence: a step in flight may still
        sample into it, but that token is void by its epoch, and the next owner's `SlotSet` comes with a later step."""
        self.remaining[slot] = 0
        self._free.append(slot)

    def set_sampling(self, slot: int, op: GenerateOp) -> None:
        """Take over what sampling needs of an operation."""
        self.seeds[slot] = op.seed & _MASK64
        self.output_index[slot] = op.num_output
        self.remaining[slot] = op.max_tokens - op.num_output
        self.min_tokens[slot] = op.stop.min_tokens
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
        count, kv_lens = len(slots), self.total[slots]
        positions = kv_lens - 1
        last_pages, offsets = np.divmod(positions, page_size)
        num_pages = last_pages + 1
        leading = self._leading(num_pages)
        return RowArrays(
            token_ids=self._nothing[:count],
            token_slots=slots,
            positions=positions,
            write_slots=self.pages[slots, last_pages] * page_size + offsets,
            q_lens=self._ones[:count],
            kv_lens=kv_lens,
            num_pages=num_pages,
            page_ids=self.pages[slots, : leading.shape[1]][leading],
        )

    def words(self, slots: I32, num_pages: I32) -> U32:
        """Visibility words of the first `num_pages` [n] pages of each of `slots` [n], one after the other."""
        words = np.full((len(slots), num_pages.max()), 0xFFFFFFFF, np.uint32)
        if self._visibility is not None:
            masked = np.flatnonzero(self.masked[slots])
            words[masked] = self._visibility[slots[masked], : words.shape[1]]
        return words[self._leading(num_pages)]

    def count_samples(self, slots: I32) -> None:
        """Each of `slots` samples one token."""
        self.total[slots] += 1
        self.output_index[slots] += 1
        self.remaining[slots] -= 1

    def _leading(self, num_pages: I32) -> npt.NDArray[np.bool_]:
        """[n, m] which of the first m pages belong to each row, m being the most that one has."""
        return np.arange(num_pages.max(), dtype=np.int32) < num_pages[:, None]

    def set_pages(self, slot: int, pages: list[int]) -> None:
        """Take over a page table."""
        self.pages[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)


def uniforms(seeds: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits: splitmix64 (Steele et al. 2014) over seed and output index, [n] -> [n]."""
    # Products of arrays wrap around, without a word, as the algorithm wants it.
    state = _mix(seeds) + (index.astype(np.uint64) + _ONE) * _GOLDEN
    return (_mix(state) >> _SHIFTS[3]).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> _SHIFTS[0])) * _FACTORS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _FACTORS[1]
    return state ^ (state >> _SHIFTS[2])
