"""What commands on spaces add to a step: rows with explicit visibility, embeddings, one-off samplers, distributions.

Owns their arrays while a step is built. `weft.sched.batch` joins them with those of sequences: rows of sequences and
spaces in the order they are added, output rows of forwards before those of stored vectors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.core.sampling import SamplingParams
from weft.core.step import F64, I32, U32, Bool, EmbedBatch, HeadBatch, SlotSet
from weft.sched.columns import as_array
from weft.sched.slots import uniforms
from weft.sched.spaces.rows import ExplicitRow

_ALL = np.uint32(0xFFFFFFFF)
_MASK64 = (1 << 64) - 1


class SpaceRow(NamedTuple):
    """Where a row's query tokens are in the batch."""

    first: int
    num_tokens: int


class SpaceSample(NamedTuple):
    """One of a step's one-off samplers."""

    client: int
    space: int
    op: int
    number: int
    """Among the step's one-off samplers."""


class SpaceDist(NamedTuple):
    """Distributions of the `k` most probable tokens each, and scores of given tokens."""

    client: int
    space: int
    op: int
    num_rows: int
    k: int
    num_targets: int


class _Special(NamedTuple):
    """A row that is not causal, and its packed mask."""

    row: int
    mask: bytes


class SpaceParts:
    """The parts that commands on spaces add to one step."""

    def __init__(self) -> None:
        self.token_copies: list[I32] = []
        self.slot_sets: list[SlotSet] = []
        self.sampler_rows = array("i")
        """Output rows of forwards."""
        self.sampler_slots = array("i")
        self.dist_top = 0
        self._seeds: list[int] = []
        self._indices: list[int] = []
        self._embed_tokens = array("i")
        self._embed_slots = array("i")
        self._head_slots = array("i")
        self._dist_rows: list[int] = []
        self._score_rows: list[int] = []
        self._score_targets: list[int] = []
        self._store_tokens = array("i")
        self._store_slots = array("i")
        self._special: list[_Special] = []
        self._shown: list[tuple[int, U32 | list[int]]] = []
        self._inputs: list[tuple[int, Sequence[int]]] = []

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the KV of `count` places."""
        steps = np.arange(count, dtype=np.int32)
        self.token_copies.append(np.stack((source + steps, target + steps), axis=1))

    def embed(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Write the input embeddings of tokens into embedding slots, before the forward."""
        self._embed_tokens.extend(tokens)
        self._embed_slots.extend(slots)

    def add_row(self, row: int, entry: int, made: ExplicitRow) -> None:
        """Row number `row` of the batch, whose pages begin at `entry`."""
        if made.visibility is not None:
            self._shown.append((entry, made.visibility))
        if not made.causal:
            self._special.append(_Special(row, made.mask))

    def show(self, entry: int, words: U32) -> None:
        """What rows of sequences see of their pages, which begin at `entry`."""
        self._shown.append((entry, words))

    def take_inputs(self, first: int, slots: Sequence[int]) -> None:
        """The query tokens from `first` on are stored vectors."""
        self._inputs.append((first, slots))

    def store(self, row: SpaceRow, slots: Sequence[int]) -> None:
        """Keep the final hidden states of a row's last query tokens."""
        last = row.first + row.num_tokens
        self._store_tokens.extend(range(last - len(slots), last))
        self._store_slots.extend(slots)

    def sample(self, output: int, slot: int, sampling: SamplingParams, index: int, op: int) -> None:
        """Draw from an output row of the forward, as the `index`th token of a generation with these parameters would
        be."""
        self._seeds.append((op if sampling.seed is None else sampling.seed) & _MASK64)
        self._indices.append(index)
        self.slot_sets.append(SlotSet(slot=slot, params=sampling))
        self.sampler_rows.append(output)
        self.sampler_slots.append(slot)

    def distribute(self, slots: Sequence[int], k: int, targets: Sequence[int]) -> None:
        """Distributions of stored vectors, and the scores of tokens given for each."""
        rows = range(len(self._head_slots), len(self._head_slots) + len(slots))
        self._head_slots.extend(slots)
        if k:
            self._dist_rows.extend(rows)
            self.dist_top = max(self.dist_top, k)
        if targets:
            each = len(targets) // len(slots)
            self._score_rows.extend(row for row in rows for _ in range(each))
            self._score_targets.extend(targets)

    # The arrays, once all is added

    def embed_batch(self) -> EmbedBatch | None:
        """The embeddings to write, as the step carries them."""
        if not self._embed_tokens:
            return None
        return EmbedBatch(as_array(self._embed_tokens), as_array(self._embed_slots))

    def head_batch(self) -> HeadBatch | None:
        """The distributions to compute, as the step carries them."""
        return HeadBatch(as_array(self._head_slots)) if self._head_slots else None

    def uniforms(self) -> F64:
        """[one-off samplers] in [0, 1)."""
        return uniforms(np.array(self._seeds, np.uint64), np.array(self._indices, np.int64))

    def dist_rows(self, num_outputs: int) -> list[int]:
        """Output rows, given those of the forward."""
        return [num_outputs + row for row in self._dist_rows]

    def scores(self, num_outputs: int) -> tuple[list[int], list[int]]:
        """Output rows and tokens, given the output rows of the forward."""
        return [num_outputs + row for row in self._score_rows], self._score_targets

    def stores(self) -> tuple[I32, I32]:
        """Query tokens and embedding slots."""
        return as_array(self._store_tokens), as_array(self._store_slots)

    def embed_slots(self, num_tokens: int) -> I32 | None:
        """[T], or None where no query token is a stored vector."""
        if not self._inputs:
            return None
        found = np.full(num_tokens, -1, np.int32)
        for first, slots in self._inputs:
            found[first : first + len(slots)] = slots
        return found

    def causal(self, num_rows: int) -> Bool | None:
        """[R], or None where all are."""
        if not self._special:
            return None
        found = np.ones(num_rows, np.bool_)
        found[[special.row for special in self._special]] = False
        return found

    def visibility(self, num_entries: int) -> U32 | None:
        """[K], or None where everything is visible."""
        if not self._shown:
            return None
        found = np.full(num_entries, _ALL, np.uint32)
        for entry, words in self._shown:
            found[entry : entry + len(words)] = words
        return None if (found == _ALL).all() else found

    def masks(self, num_rows: int) -> tuple[np.ndarray | None, I32 | None]:
        """The packed masks of all rows: `mask_bits` and `mask_indptr`."""
        if not self._special:
            return None, None
        sizes = np.zeros(num_rows, np.int32)
        for special in self._special:
            sizes[special.row] = len(special.mask)
        indptr = np.zeros(num_rows + 1, np.int32)
        np.cumsum(sizes, out=indptr[1:])
        data = b"".join(special.mask for special in self._special)
        return np.frombuffer(data, np.uint8), indptr
