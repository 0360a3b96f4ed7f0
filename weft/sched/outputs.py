"""`StepOutputs`: the output rows of the step that is being built, and what is made of them.

Output rows of decoding sequences come first, one sampler each; then those of chunks and of explicit rows, in the order
in which they are asked for; then, without a forward, those of stored vectors (`SpaceParts`).
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from weft.core.step import I32, NO_PAIRS, SamplingBatch, SlotSet
from weft.sched.columns import as_array
from weft.sched.in_flight import HiddenSum, InFlight, ScoredTokens
from weft.sched.sequence import AppendOp, GenerateOp, Sequence
from weft.sched.slots import DecodeTable
from weft.sched.spaces.parts import SpaceParts

NOTHING = np.zeros(0, np.int32)


class StepOutputs:
    """Output rows, samplers, scores, sums of hidden states and distributions of sequences."""

    def __init__(self, table: DecodeTable):
        self._table = table
        self._decode_slots: I32 | None = None
        self._num_rows = 0
        self._tokens = array("i")
        """The query token of each output row after those of decoding sequences."""
        self._sampler_rows = array("i")
        self._sampler_slots = array("i")
        self._score_rows: list[int] = []
        self._score_targets: list[int] = []
        self._score_top = 0
        self._hidden: list[tuple[int, int]] = []
        self._dist_rows: list[int] = []
        self._dist_top = 0

    def sample_decodes(self, slots: I32) -> None:
        """The first `len(slots)` query tokens feed the samplers of these slots."""
        self._decode_slots = slots
        self._num_rows = len(slots)

    def add_row(self, token: int) -> int:
        """The hidden state of a query token goes to the language-model head. Returns the output row."""
        self._tokens.append(token)
        self._num_rows += 1
        return self._num_rows - 1

    def sample(self, row: int, slot: int) -> None:
        """Sample from an output row for a slot."""
        self._sampler_rows.append(row)
        self._sampler_slots.append(slot)

    def report(
        self, in_flight: InFlight, sequence: Sequence, op: AppendOp, first_query: int, start: int, end: int
    ) -> None:
        """What an append asks for about tokens `start` to `end`, which are query tokens from `first_query` on: scores,
        sums of hidden states, the distribution."""
        outputs = op.outputs
        if outputs is None:
            return
        last = op.start + len(op.tokens)
        shift = first_query - start
        if outputs.logprobs is not None:
            self._score_top = max(self._score_top, outputs.logprobs)
            # A token's score comes from the row of the token before it.
            first = max(op.start, start + 1)
            targets = range(first, min(end + 1, last))
            for target in targets:
                self._score_rows.append(self.add_row(shift + target - 1))
                self._score_targets.append(sequence.tokens[target])
            if targets:
                in_flight.scored.append(ScoredTokens(sequence, sequence.kv_epoch, op, first, len(targets)))
        if outputs.hidden is not None:
            group = len(in_flight.hidden_sums)
            wanted = range(max(op.start if outputs.hidden == "mean" else last - 1, start), min(end, last))
            self._hidden.extend((shift + token, group) for token in wanted)
            if wanted:
                in_flight.hidden_sums.append(HiddenSum(sequence, sequence.kv_epoch, op, len(wanted)))
        if outputs.dist is not None and end == last:
            self._dist_top = max(self._dist_top, outputs.dist)
            self._dist_rows.append(self.add_row(shift + last - 1))
            in_flight.distributions.append((sequence, sequence.kv_epoch, op))

    # The arrays, once all is added

    def tokens(self) -> I32:
        """[O] query tokens of the forward's output rows."""
        return self._after_decodes(self._tokens)

    def hidden(self) -> I32:
        """[H, 2] query tokens, and the sums they belong to."""
        return np.array(self._hidden, np.int32) if self._hidden else NO_PAIRS

    def sampling(self, parts: SpaceParts | None) -> SamplingBatch | None:
        """What the step samples and reports, that of spaces included; counts the samplers of sequences on. None where
        nothing is wanted."""
        score_rows, score_targets, dist_rows = self._score_rows, self._score_targets, self._dist_rows
        dist_top = self._dist_top
        if parts is not None:
            rows, targets = parts.scores(self._num_rows)
            score_rows, score_targets = score_rows + rows, score_targets + targets
            dist_rows, dist_top = dist_rows + parts.dist_rows(self._num_rows), max(dist_top, parts.dist_top)
        slots = self._slots()
        space_samplers = [] if parts is None else parts.sampler_rows
        if not (len(slots) or space_samplers or score_rows or dist_rows):
            return None
        samplers = self._table.sample(slots)
        batch = SamplingBatch(
            rows=self._after_decodes(self._sampler_rows),
            slots=slots,
            uniforms=samplers.uniforms,
            num_logprobs=samplers.num_logprobs,
            suppress_stop=samplers.suppress_stop,
            late_mask=samplers.late_mask,
            score_rows=_int_array(score_rows),
            score_targets=_int_array(score_targets),
            score_top=self._score_top,
            dist_rows=_int_array(dist_rows),
            dist_top=dist_top,
        )
        return batch if parts is None or not space_samplers else _with_samplers(batch, parts)

    def _slots(self) -> I32:
        """[S] the slots of all samplers."""
        slots = as_array(self._sampler_slots)
        if self._decode_slots is None:
            return slots
        return np.concatenate((self._decode_slots, slots)) if len(slots) else self._decode_slots

    def _after_decodes(self, numbers: array[int]) -> I32:
        """0, 1, ... for each decoding sequence, then `numbers`."""
        if self._decode_slots is None:
            return as_array(numbers)
        decodes = self._table.numbers[: len(self._decode_slots)]
        return np.concatenate((decodes, as_array(numbers))) if numbers else decodes


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


def _int_array(numbers: list[int]) -> I32:
    return np.array(numbers, np.int32) if numbers else NOTHING


def _with_samplers(batch: SamplingBatch, parts: SpaceParts) -> SamplingBatch:
    """One-off samplers of spaces after those of sequences."""
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
