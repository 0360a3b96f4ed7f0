"""`StepBuilder`: turns what was decided into a step, and remembers what its results will mean.

Owns the layout of a batch: decode rows first, in order of rank, then chunks and explicit rows in the order in which
they are added. The rows are in `ragged.py`, what is made of them in `outputs.py`, the parts that only spaces have in
`spaces/parts.py`. Called by the step planner, which has made every page writable before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

import msgspec
import numpy as np

from weft.cache.copies import Copies
from weft.core.sampling import SamplingParams
from weft.core.step import I32, NO_PAIRS, ForwardBatch, SlotSet, Step
from weft.sched.columns import SHORT
from weft.sched.in_flight import InFlight
from weft.sched.masks import mask_at, visibility
from weft.sched.outputs import StepOutputs
from weft.sched.ragged import RaggedRows, RowArrays
from weft.sched.sequence import AppendOp, Sequence, begin_decodes
from weft.sched.slots import DecodeTable
from weft.sched.spaces.parts import SpaceDist, SpaceParts, SpaceRow, SpaceSample
from weft.sched.spaces.rows import ExplicitRow


class StepBuilder:
    """Builds one step. Add the decodes once, then chunks and rows, then `build`."""

    def __init__(self, step_id: int, slots: DecodeTable, page_size: int):
        self.in_flight = InFlight(step_id)
        self.num_tokens = 0
        self.num_rows = 0
        self.num_score_rows = 0
        """Tokens whose log-probabilities are asked for, as the planner counts them."""
        self._num_entries = 0
        """Pages of all rows so far."""
        self._slots = slots
        self._page_size = page_size
        self._rows = RaggedRows()
        self._outputs = StepOutputs(slots)
        self._slot_sets: list[SlotSet] = []
        self._spaces: SpaceParts | None = None

    @property
    def num_space_samples(self) -> int:
        """How many one-off samplers of spaces this step has so far."""
        return len(self.in_flight.space_samples)

    def add_slot_set(self, slot_set: SlotSet) -> None:
        """Place a sequence's sampling state before this step samples."""
        self._slot_sets.append(slot_set)

    def add_decodes(self, slots: I32, sequences: list[Sequence]) -> None:
        """One token each for `slots` [n]: the one their slot sampled last. Counts them on."""
        rows = self._rows.decodes = self._slots.rows(slots, self._page_size)
        if self._slots.has_masked and np.count_nonzero(self._slots.masked[slots]):
            self._parts().show(0, self._slots.words(slots, rows.num_pages))
        self._outputs.sample_decodes(slots)
        self.num_tokens = self.num_rows = len(slots)
        self._num_entries = len(rows.page_ids)
        self.in_flight.sampled.extend([(sequence, sequence.epoch) for sequence in sequences])
        self.in_flight.decoded.extend(begin_decodes(sequences, self.in_flight.step_id))

    def add_chunk(self, sequence: Sequence, start: int, end: int, samplers: list[Sequence]) -> None:
        """Known tokens `start` to `end` of a sequence. From the last one's row sample `samplers`: the sequence itself,
        and forks of it that stand at the same place."""
        count = end - start
        pages = sequence.table.pages[: -(-end // self._page_size)]
        if sequence.masks:
            mask = mask_at(sequence.masks, start)
            if mask is not None and mask.hidden:
                self._parts().show(self._num_entries, visibility(mask.hidden, len(pages), self._page_size))
        positions, write_slots = _places(pages, start, end, self._page_size)
        self._rows.add(sequence.tokens[start:end], positions, write_slots, count, end, pages)
        head = sequence.head
        if isinstance(head, AppendOp):
            self._outputs.report(self.in_flight, sequence, head, self.num_tokens, start, end)
        if samplers:
            row = self._outputs.add_row(self.num_tokens + count - 1)
            for sampler in samplers:
                self._outputs.sample(row, sampler.slot)
                self.in_flight.sampled.append((sampler, sampler.epoch))
        self.in_flight.written.append((sequence, sequence.kv_epoch, end))
        sequence.last_step = self.in_flight.step_id
        self._count_row(count, len(pages))

    def add_written(self, sequence: Sequence, end: int) -> None:
        """A fork's first `end` tokens are written by its parent's chunk in this step."""
        self.in_flight.written.append((sequence, sequence.kv_epoch, end))

    # For commands on spaces

    def add_token_copies(self, source: int, target: int, count: int) -> None:
        """Copy the KV of `count` places before the forward."""
        self._parts().copy_tokens(source, target, count)

    def add_embeds(self, tokens: Items[int], slots: Items[int]) -> None:
        """Write input embeddings before the forward."""
        self._parts().embed(tokens, slots)

    def add_space_row(
        self,
        row: ExplicitRow,
        positions: Items[int],
        write_slots: Items[int],
        tokens: Items[int] | None,
        embed_slots: Items[int] | None,
    ) -> SpaceRow:
        """A row over explicit pages; its inputs are token ids, or stored vectors."""
        parts, count = self._parts(), len(positions)
        added = SpaceRow(self.num_tokens, count)
        parts.add_row(self.num_rows, self._num_entries, row)
        if embed_slots is not None:
            parts.take_inputs(self.num_tokens, embed_slots)
        self._rows.add(tokens, positions, write_slots, count, row.kv_len, row.page_ids)
        self._count_row(count, len(row.page_ids))
        return added

    def add_stores(self, row: SpaceRow, slots: Items[int]) -> None:
        """Keep the final hidden states of a row's last query tokens."""
        self._parts().store(row, slots)

    def add_space_sample(
        self, row: SpaceRow, slot: int, sampling: SamplingParams, index: int, who: tuple[int, int, int]
    ) -> None:
        """Sample what follows a row's last query token, for (client, space, operation) `who`."""
        output = self._outputs.add_row(row.first + row.num_tokens - 1)
        self._parts().sample(output, slot, sampling, index, who[2])
        self.in_flight.space_samples.append(SpaceSample(*who, self.num_space_samples))

    def add_space_dist(self, slots: Items[int], k: int, targets: Items[int], who: tuple[int, int, int]) -> None:
        """Distributions of stored vectors, for (client, space, operation) `who`."""
        self._parts().distribute(slots, k, targets)
        self.in_flight.space_dists.append(SpaceDist(*who, len(slots), k, len(targets)))

    def build(self, copies: Copies) -> Step:
        """The step with everything that was added, and the `copies` it must make first."""
        self.in_flight.num_tokens = self.num_tokens
        self.in_flight.num_rows = self.num_rows
        parts = self._spaces
        return Step(
            step_id=self.in_flight.step_id,
            swap_outs=_pairs(copies.swap_outs),
            page_copies=_pairs(copies.page_copies),
            token_copies=np.concatenate(parts.token_copies) if parts and parts.token_copies else NO_PAIRS,
            swap_ins=_pairs(copies.swap_ins),
            slot_sets=self._slot_sets + (parts.slot_sets if parts else []),
            embed=parts.embed_batch() if parts else None,
            forward=self._forward() if self.num_tokens else None,
            head=parts.head_batch() if parts else None,
            sampling=self._outputs.sampling(parts),
        )

    def _parts(self) -> SpaceParts:
        if self._spaces is None:
            self._spaces = SpaceParts()
        return self._spaces

    def _count_row(self, num_tokens: int, num_pages: int) -> None:
        self.num_tokens += num_tokens
        self.num_rows += 1
        self._num_entries += num_pages

    def _forward(self) -> ForwardBatch:
        rows, hidden = self._rows.arrays(), self._outputs.hidden()
        on_device = bool(np.count_nonzero(rows.token_ids < 0))
        batch = ForwardBatch(
            token_ids=rows.token_ids,
            token_slots=rows.token_slots if on_device else None,
            positions=rows.positions,
            write_slots=rows.write_slots,
            q_indptr=_bounds_of_queries(rows),
            kv_indptr=_indptr(rows.num_pages),
            kv_page_ids=rows.page_ids,
            kv_lens=rows.kv_lens,
            output_tokens=self._outputs.tokens(),
            hidden_tokens=hidden[:, 0],
            hidden_groups=hidden[:, 1],
        )
        return batch if self._spaces is None else self._with_spaces(batch, self._spaces)

    def _with_spaces(self, batch: ForwardBatch, parts: SpaceParts) -> ForwardBatch:
        mask_bits, mask_indptr = parts.masks(self.num_rows)
        store_tokens, store_slots = parts.stores()
        return msgspec.structs.replace(
            batch,
            embed_slots=parts.embed_slots(self.num_tokens),
            causal=parts.causal(self.num_rows),
            visibility=parts.visibility(self._num_entries),
            mask_bits=mask_bits,
            mask_indptr=mask_indptr,
            store_tokens=store_tokens,
            store_slots=store_slots,
        )


def _places(pages: list[int], start: int, end: int, page_size: int) -> tuple[Iterable[int], Iterable[int]]:
    """Positions of tokens `start` to `end` of a page table, and where their KV goes."""
    if end - start <= SHORT:
        tokens = range(start, end)
        return tokens, [pages[at // page_size] * page_size + at % page_size for at in tokens]
    first = start // page_size
    positions = np.arange(start, end, dtype=np.int32)
    own = np.array(pages[first:], np.int32)
    write_slots = own[positions // page_size - first] * page_size + positions % page_size
    return array("i", positions.tobytes()), array("i", write_slots.tobytes())


def _pairs(pairs: list[tuple[int, int]]) -> I32:
    return np.array(pairs, np.int32).reshape(-1, 2) if pairs else NO_PAIRS


def _bounds_of_queries(rows: RowArrays) -> I32:
    """[R + 1] where the query tokens of each row begin, and end."""
    num_rows = len(rows.q_lens)
    if num_rows == len(rows.token_ids):  # each has one: none is empty
        return np.arange(num_rows + 1, dtype=np.int32)
    return _indptr(rows.q_lens)


def _indptr(lengths: I32) -> I32:
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.add.accumulate(lengths, out=indptr[1:])
    return indptr
