"""What commands on spaces add to a step: rows with explicit visibility, embeddings, one-off samplers, distributions.

Owns their arrays while a step is built. `weft.sched.batch` joins them with those of sequences: rows of sequences and
spaces in the order they are added, output rows of forwards before those of stored vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.core.sampling import SamplingParams
from weft.core.step import F64, I32, U32, Bool, EmbedBatch, HeadBatch, SlotSet
from weft.sched.slots import uniforms
from weft.sched.spaces.rows import Row

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
    row: int
    entry: int
    made: Row


class SpaceParts:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.token_copies: list[I32] = []
        self.slot_sets: list[SlotSet] = []
        self.sampler_rows: list[int] = []
        """Output rows of forwards."""
        self.sampler_slots: list[int] = []
        self.uniforms: list[F64] = []
        self.dist_top = 0
        self._embed_tokens: list[I32] = []
        self._embed_slots: list[I32] = []
        self._head_slots: list[I32] = []
        self._num_head = 0
        self._dist_rows: list[int] = []
        self._score_rows: list[I32] = []
        self._score_targets: list[I32] = []
        self._store_tokens: list[I32] = []
        self._store_slots: list[I32] = []
        self._special: list[_Special] = []
        self._shown: list[tuple[int, U32]] = []
        self._inputs: list[tuple[int, I32]] = []

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the KV of `count` places."""
        steps = np.arange(count, dtype=np.int32)
        self.token_copies.append(np.stack((source + steps, target + steps), axis=1))

    def embed(self, tokens: I32, slots: I32) -> None:
        """Write input embeddings."""
        self._embed_tokens.append(tokens)
        self._embed_slots.append(slots)

    def add_row(self, row: int, entry: int, made: Row) -> None:
        """Row number `row` of the batch, whose pages begin at `entry`."""
        self._special.append(_Special(row, entry, made))

    def show(self, entry: int, words: U32) -> None:
        """What rows of sequences see of their pages, which begin at `entry`."""
        self._shown.append((entry, words))

    def take_inputs(self, first: int, slots: I32) -> None:
        """The query tokens from `first` on are stored vectors."""
        self._inputs.append((first, slots))

    def store(self, row: SpaceRow, slots: I32) -> None:
        """Keep the final hidden states of a row's last query tokens."""
        last = row.first + row.num_tokens
        self._store_tokens.append(np.arange(last - len(slots), last, dtype=np.int32))
        self._store_slots.append(slots)

    def sample(self, output: int, slot: int, sampling: SamplingParams, index: int, op: int) -> None:
        """Draw from an output row of the forward, as the `index`th token of a generation with these parameters would
        be."""
        seed = (op if sampling.seed is None else sampling.seed) & _MASK64
        self.slot_sets.append(SlotSet(slot=slot, params=sampling))
        self.sampler_rows.append(output)
        self.sampler_slots.append(slot)
        self.uniforms.append(uniforms(np.array([seed], np.uint64), np.array([index], np.int64)))

    def distribute(self, slots: I32, k: int, targets: I32) -> None:
        """Distributions of stored vectors, and the scores of tokens given for each."""
        rows = np.arange(self._num_head, self._num_head + len(slots), dtype=np.int32)
        self._head_slots.append(slots)
        self._num_head += len(slots)
        if k:
            self._dist_rows.extend(rows.tolist())
            self.dist_top = max(self.dist_top, k)
        if len(targets):
            self._score_rows.append(np.repeat(rows, len(targets) // len(slots)))
            self._score_targets.append(targets)

    # The arrays, once all is added

    def embed_batch(self) -> EmbedBatch | None:
        """For the step."""
        if not self._embed_tokens:
            return None
        return EmbedBatch(np.concatenate(self._embed_tokens), np.concatenate(self._embed_slots))

    def head_batch(self) -> HeadBatch | None:
        """For the step."""
        return HeadBatch(np.concatenate(self._head_slots)) if self._head_slots else None

    def dist_rows(self, num_outputs: int) -> list[int]:
        """Output rows, given those of the forward."""
        return [num_outputs + row for row in self._dist_rows]

    def scores(self, num_outputs: int) -> tuple[list[int], list[int]]:
        """Output rows and tokens, given the output rows of the forward."""
        if not self._score_rows:
            return [], []
        rows = np.concatenate(self._score_rows) + num_outputs
        return rows.tolist(), np.concatenate(self._score_targets).tolist()

    def stores(self) -> tuple[I32, I32]:
        """Query tokens and embedding slots."""
        empty = np.empty(0, np.int32)
        if not self._store_tokens:
            return empty, empty
        return np.concatenate(self._store_tokens), np.concatenate(self._store_slots)

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
        if all(special.made.causal for special in self._special):
            return None
        found = np.ones(num_rows, np.bool_)
        for special in self._special:
            found[special.row] = special.made.causal
        return found

    def visibility(self, num_entries: int) -> U32 | None:
        """[K], or None where everything is visible."""
        shown = [*self._shown, *((special.entry, special.made.visibility) for special in self._special)]
        if all((words == _ALL).all() for _, words in shown):
            return None
        found = np.full(num_entries, _ALL, np.uint32)
        for entry, words in shown:
            found[entry : entry + len(words)] = words
        return found

    def masks(self, num_rows: int) -> tuple[np.ndarray | None, I32 | None]:
        """`mask_bits` and `mask_indptr`."""
        if not any(special.made.mask for special in self._special):
            return None, None
        sizes = np.zeros(num_rows, np.int32)
        for special in self._special:
            sizes[special.row] = len(special.made.mask)
        indptr = np.zeros(num_rows + 1, np.int32)
        np.cumsum(sizes, out=indptr[1:])
        data = b"".join(special.made.mask for special in sorted(self._special, key=lambda special: special.row))
        return np.frombuffer(data, np.uint8), indptr
