"""`StepBuilder`: turns what was decided into the arrays of a step, and remembers what its results will mean.

Owns the layout of a batch: decode rows first, in order of rank, then chunks. Called by the scheduler, which has made
every page writable before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from weft.cache.tiers import Copies
from weft.core.sampling import SamplingParams
from weft.core.step import I32, ForwardBatch, SamplingBatch, SlotSet, Step, no_pairs
from weft.sched.columns import SHORT, as_array, ints, put
from weft.sched.masks import mask_at, visibility
from weft.sched.sequence import AppendOp, GenerateOp, Sequence, begin_decodes
from weft.sched.slots import DecodeTable, uniforms
from weft.sched.spaces.parts import SpaceDist, SpaceParts, SpaceRow, SpaceSample
from weft.sched.spaces.rows import Row


class PromptChunk(NamedTuple):
    """Known tokens `start` to `end` of a sequence, computed by this step."""

    sequence: Sequence
    start: int
    end: int
    samplers: list[Sequence]
    """Who samples from the last token's row: the sequence itself and forks of it that stand at the same place."""


Sampled = tuple[Sequence, int]
"""A sampler of a step in flight: (sequence, its `epoch`). A plain tuple, as `Decoded`: each step has as many as there
are sequences that decode."""
Decoded = tuple[Sequence, int, int]
"""One token of a decoding sequence: (sequence, its `kv_epoch`, how many tokens have KV once the step is done)."""


class Written(NamedTuple):
    """The first `end` tokens of a sequence have KV once the step is done."""

    sequence: Sequence
    epoch: int
    end: int


class Scored(NamedTuple):
    """`num` scores of a step, the first for token `first` of the sequence."""

    sequence: Sequence
    epoch: int
    op: AppendOp
    first: int
    num: int


class Pooled(NamedTuple):
    """One of a step's hidden sums, over `num` tokens."""

    sequence: Sequence
    epoch: int
    op: AppendOp
    num: int


class Distributed(NamedTuple):
    """One of a step's distributions."""

    sequence: Sequence
    epoch: int
    op: AppendOp


@dataclass(slots=True)
class InFlight:
    """What the results of a launched step mean."""

    step_id: int
    sampled: list[Sampled] = field(default_factory=list)
    decoded: list[Decoded] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    """By chunks."""
    scored: list[Scored] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    distributed: list[Distributed] = field(default_factory=list)
    space_samples: list[SpaceSample] = field(default_factory=list)
    """Their samplers come after all of `sampled`."""
    space_dists: list[SpaceDist] = field(default_factory=list)
    """Their rows come after all of `distributed` and `scored`."""
    num_tokens: int = 0
    num_rows: int = 0


_NO_PARTS = SpaceParts()
_NOWHERE = ints([-1])


class _Rows:
    """The columns of a ragged batch as it grows: one buffer each, whoever adds to it, and no array per row."""

    def __init__(self) -> None:
        self.token_ids = ints()
        self.token_slots = ints()
        self.positions = ints()
        self.write_slots = ints()
        self.q_lens = ints()
        self.kv_lens = ints()
        self.num_pages = ints()
        self.page_ids = ints()


class StepBuilder:
    """Builds one step. Add the decodes once, then chunks, then `build`."""

    def __init__(self, step_id: int, slots: DecodeTable, page_size: int):
        self.in_flight = InFlight(step_id)
        self.num_tokens = 0
        self._score_top = 0
        self._slots = slots
        self._page_size = page_size
        self._rows = _Rows()
        self._outputs = ints()
        self._sampler_rows = ints()
        self._sampler_slots = ints()
        self._score_rows: list[int] = []
        self._score_targets: list[int] = []
        self._hidden: list[tuple[int, int]] = []
        self._dist_rows: list[int] = []
        self._dist_top = 0
        self._slot_sets: list[SlotSet] = []
        self._spaces: SpaceParts | None = None
        self.num_rows = 0
        self._num_entries = 0

    @property
    def num_space_samples(self) -> int:
        """How many one-off samplers of spaces this step has so far."""
        return len(self.in_flight.space_samples)

    def add_slot_set(self, slot_set: SlotSet) -> None:
        """Place a sequence's sampling state before this step samples."""
        self._slot_sets.append(slot_set)

    def add_decodes(self, slots: I32, sequences: list[Sequence]) -> None:
        """One token each for `slots` [n]: the one their slot sampled last. Counts them on."""
        table = self._slots
        count = len(slots)
        kv_lens = table.total[slots]
        positions = kv_lens - 1
        num_pages = -(-kv_lens // self._page_size)
        rows = self._rows
        pages = table.pages[slots, : int(num_pages.max())]
        used = np.arange(pages.shape[1], dtype=np.int32) < num_pages[:, None]
        put(rows.page_ids, pages[used])
        if table.masked[slots].any():
            self._parts().show(0, table.words(slots, pages.shape[1])[used])
        last = table.pages[slots, positions // self._page_size]
        put(rows.write_slots, last * self._page_size + positions % self._page_size)
        put(rows.token_ids, np.full(count, -1, np.int32))
        put(rows.token_slots, slots)
        put(rows.positions, positions)
        put(rows.q_lens, np.ones(count, np.int32))
        put(rows.kv_lens, kv_lens)
        put(rows.num_pages, num_pages)
        numbers = np.arange(count, dtype=np.int32)
        put(self._outputs, numbers)
        put(self._sampler_rows, numbers)
        put(self._sampler_slots, slots)
        self.num_tokens = self.num_rows = count
        self._num_entries = len(rows.page_ids)
        self.in_flight.sampled.extend([(sequence, sequence.epoch) for sequence in sequences])
        self.in_flight.decoded.extend(begin_decodes(sequences, self.in_flight.step_id))

    def add_chunk(self, chunk: PromptChunk) -> None:
        """Known tokens of one sequence, and what is to be made of their rows."""
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        size = self._page_size
        rows = self._rows
        count = end - start
        pages = sequence.table.pages[: -(-end // size)]
        rows.token_ids.extend(sequence.tokens[start:end])
        rows.token_slots.extend(_NOWHERE * count)
        if count <= SHORT:
            rows.positions.extend(range(start, end))
            rows.write_slots.extend([pages[at // size] * size + at % size for at in range(start, end)])
        else:
            positions = np.arange(start, end, dtype=np.int32)
            put(rows.positions, positions)
            first = start // size
            own = np.array(pages[first:], np.int32)
            put(rows.write_slots, own[positions // size - first] * size + positions % size)
        rows.q_lens.append(count)
        rows.kv_lens.append(end)
        rows.num_pages.append(len(pages))
        rows.page_ids.extend(pages)
        if sequence.masks:
            mask = mask_at(sequence.masks, start)
            if mask is not None and mask.hidden:
                self._parts().show(self._num_entries, visibility(mask.hidden, len(pages), size))
        if isinstance(sequence.head, AppendOp):
            self._add_reports(sequence, sequence.head, start, end)
        if chunk.samplers:
            row = self._add_output(self.num_tokens + count - 1)
            for sampler in chunk.samplers:
                self._sampler_rows.append(row)
                self._sampler_slots.append(sampler.slot)
                self.in_flight.sampled.append((sampler, sampler.epoch))
        self.in_flight.written.append(Written(sequence, sequence.kv_epoch, end))
        sequence.last_step = self.in_flight.step_id
        self._count_row(count, len(pages))

    # For commands on spaces

    def add_token_copies(self, source: int, target: int, count: int) -> None:
        """Copy the KV of `count` places before the forward."""
        self._parts().copy_tokens(source, target, count)

    def add_embeds(self, tokens: Items[int], slots: Items[int]) -> None:
        """Write input embeddings before the forward."""
        self._parts().embed(tokens, slots)

    def add_space_row(
        self,
        row: Row,
        positions: Items[int],
        write_slots: Items[int],
        tokens: Items[int] | None,
        embed_slots: Items[int] | None,
    ) -> SpaceRow:
        """A row over explicit pages; its inputs are token ids, or stored vectors."""
        parts, rows, count = self._parts(), self._rows, len(positions)
        added = SpaceRow(self.num_tokens, count)
        parts.add_row(self.num_rows, self._num_entries, row)
        if embed_slots is not None:
            parts.take_inputs(self.num_tokens, embed_slots)
        none = _NOWHERE * count
        rows.token_ids.extend(none if tokens is None else tokens)
        rows.token_slots.extend(none)
        rows.positions.extend(positions)
        rows.write_slots.extend(write_slots)
        rows.q_lens.append(count)
        rows.kv_lens.append(row.kv_len)
        rows.num_pages.append(len(row.page_ids))
        rows.page_ids.extend(row.page_ids)
        self._count_row(count, len(row.page_ids))
        return added

    def add_stores(self, row: SpaceRow, slots: Items[int]) -> None:
        """Keep the final hidden states of a row's last query tokens."""
        self._parts().store(row, slots)

    def add_space_sample(
        self, row: SpaceRow, slot: int, sampling: SamplingParams, index: int, who: tuple[int, int, int]
    ) -> None:
        """Sample what follows a row's last query token, for (client, space, operation) `who`."""
        output = self._add_output(row.first + row.num_tokens - 1)
        self._parts().sample(output, slot, sampling, index, who[2])
        self.in_flight.space_samples.append(SpaceSample(*who, self.num_space_samples))

    def add_space_dist(self, slots: Items[int], k: int, targets: Items[int], who: tuple[int, int, int]) -> None:
        """Distributions of stored vectors, for (client, space, operation) `who`."""
        self._parts().distribute(slots, k, targets)
        self.in_flight.space_dists.append(SpaceDist(*who, len(slots), k, len(targets)))

    def _parts(self) -> SpaceParts:
        if self._spaces is None:
            self._spaces = SpaceParts()
        return self._spaces

    def _count_row(self, num_tokens: int, num_pages: int) -> None:
        self.num_tokens += num_tokens
        self.num_rows += 1
        self._num_entries += num_pages

    def add_written(self, sequence: Sequence, end: int) -> None:
        """A fork's first `end` tokens are written by its parent's chunk in this step."""
        self.in_flight.written.append(Written(sequence, sequence.kv_epoch, end))

    def build(self, copies: Copies) -> Step:
        """The step with everything that was added, and the `copies` it must make first."""
        self.in_flight.num_tokens = self.num_tokens
        self.in_flight.num_rows = self.num_rows
        parts = self._spaces
        return Step(
            step_id=self.in_flight.step_id,
            swap_outs=_pairs(copies.swap_outs),
            page_copies=_pairs(copies.page_copies),
            token_copies=np.concatenate(parts.token_copies) if parts and parts.token_copies else no_pairs(),
            swap_ins=_pairs(copies.swap_ins),
            slot_sets=self._slot_sets + (parts.slot_sets if parts else []),
            embed=parts.embed_batch() if parts else None,
            forward=self._forward() if self.num_tokens else None,
            head=parts.head_batch() if parts else None,
            sampling=self._sampling(parts),
        )

    def _add_output(self, token: int) -> int:
        self._outputs.append(token)
        return len(self._outputs) - 1

    def _add_reports(self, sequence: Sequence, op: AppendOp, start: int, end: int) -> None:
        """Scores, pooled hidden states and the distribution that an append asks for."""
        outputs = op.outputs
        if outputs is None:
            return
        last = op.start + len(op.tokens)
        if outputs.logprobs is not None:
            self._score_top = max(self._score_top, outputs.logprobs)
            first = max(op.start, start + 1)
            targets = range(first, min(end + 1, last))
            for target in targets:
                self._score_rows.append(self._add_output(self.num_tokens + target - 1 - start))
                self._score_targets.append(sequence.tokens[target])
            if targets:
                self.in_flight.scored.append(Scored(sequence, sequence.kv_epoch, op, first, len(targets)))
        if outputs.hidden is not None:
            group = len(self.in_flight.pooled)
            wanted = range(max(op.start if outputs.hidden == "mean" else last - 1, start), min(end, last))
            self._hidden.extend((self.num_tokens + token - start, group) for token in wanted)
            if wanted:
                self.in_flight.pooled.append(Pooled(sequence, sequence.kv_epoch, op, len(wanted)))
        if outputs.dist is not None and end == last:
            self._dist_top = max(self._dist_top, outputs.dist)
            self._dist_rows.append(self._add_output(self.num_tokens + last - 1 - start))
            self.in_flight.distributed.append(Distributed(sequence, sequence.kv_epoch, op))

    def _forward(self) -> ForwardBatch:
        rows = self._rows
        token_ids = as_array(rows.token_ids)
        on_device = bool((token_ids < 0).any())
        hidden = np.array(self._hidden, np.int32).reshape(-1, 2)
        batch = ForwardBatch(
            token_ids=token_ids,
            token_slots=as_array(rows.token_slots) if on_device else None,
            positions=as_array(rows.positions),
            write_slots=as_array(rows.write_slots),
            q_indptr=_indptr(rows.q_lens),
            kv_indptr=_indptr(rows.num_pages),
            kv_page_ids=as_array(rows.page_ids),
            kv_lens=as_array(rows.kv_lens),
            output_tokens=as_array(self._outputs),
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

    def _sampling(self, parts: SpaceParts | None) -> SamplingBatch | None:
        parts = parts or _NO_PARTS
        score_rows, score_targets = parts.scores(len(self._outputs))
        dist_rows = parts.dist_rows(len(self._outputs))
        wanted = self._sampler_rows or parts.sampler_rows or self._score_rows or score_rows
        if not wanted and not self._dist_rows and not dist_rows:
            return None
        table = self._slots
        slots = as_array(self._sampler_slots)
        batch = SamplingBatch(
            rows=as_array(self._sampler_rows),
            slots=slots,
            uniforms=uniforms(table.seeds[slots], table.output_index[slots]),
            num_logprobs=table.num_logprobs[slots],
            suppress_stop=table.output_index[slots] < table.min_tokens[slots],
            late_mask=table.guided[slots],
            score_rows=np.array(self._score_rows + score_rows, np.int32),
            score_targets=np.array(self._score_targets + score_targets, np.int32),
            score_top=self._score_top,
            dist_rows=np.array(self._dist_rows + dist_rows, np.int32),
            dist_top=max(self._dist_top, parts.dist_top),
        )
        table.total[slots] += 1
        table.output_index[slots] += 1
        table.remaining[slots] -= 1
        return _with_samplers(batch, parts) if parts.sampler_rows else batch


def sampling_state(sequence: Sequence, op: GenerateOp) -> SlotSet:
    """What the device needs to sample for `op` from the tokens known now."""
    start = len(sequence.tokens) - op.num_output
    needs_tokens = op.sampling.has_penalties or bool(op.sampling.bad_words)
    return SlotSet(
        slot=sequence.slot,
        params=op.sampling,
        prompt=sequence.tokens[:start].tobytes() if needs_tokens else b"",
        output=sequence.tokens[start:].tobytes() if needs_tokens else b"",
        stop_ids=sorted(op.stop_ids) if op.stop.min_tokens > 0 else [],
    )


def _with_samplers(batch: SamplingBatch, parts: SpaceParts) -> SamplingBatch:
    """One-off samplers after those of sequences."""
    count = len(parts.sampler_rows)
    off = np.zeros(count, np.bool_)
    return msgspec.structs.replace(
        batch,
        rows=np.concatenate((batch.rows, as_array(parts.sampler_rows))),
        slots=np.concatenate((batch.slots, as_array(parts.sampler_slots))),
        uniforms=np.concatenate((batch.uniforms, parts.uniforms())),
        num_logprobs=np.concatenate((batch.num_logprobs, np.full(count, -1, np.int32))),
        suppress_stop=np.concatenate((batch.suppress_stop, off)),
        late_mask=np.concatenate((batch.late_mask, off)),
    )


def _pairs(pairs: list[tuple[int, int]]) -> I32:
    return np.array(pairs, np.int32).reshape(-1, 2) if pairs else no_pairs()


def _indptr(lengths: array[int]) -> I32:
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.add.accumulate(as_array(lengths), out=indptr[1:])
    return indptr
