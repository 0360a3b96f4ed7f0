"""`StepPlanner`: which tokens the next step computes.

A step is filled in this order: one token for every decoding sequence, commands of spaces, chunks of prompts already
running, then admissions from the queue, within the token budget (Sarathi's stall-free mixing). Running sequences are
served in order of rank, waiting ones in the admission order. Background work joins as far as `ServiceClasses` says, its
prompts after all others.

Owns no state: it reads and changes `SchedulerState`. Called by `Scheduler.schedule`.
"""

from __future__ import annotations

import numpy as np

from weft.core.step import MAX_SCORE_ROWS, Step
from weft.sched.admission import Admission
from weft.sched.batch import StepBuilder
from weft.sched.config import prompt_budget
from weft.sched.in_flight import InFlight
from weft.sched.masks import mask_at, next_start
from weft.sched.operations import advance, tell_start
from weft.sched.outputs import sampling_state
from weft.sched.sequence import AppendOp, GenerateOp, Sequence, SequenceState
from weft.sched.service_classes import LATENCY
from weft.sched.state import SchedulerState

MAX_DEFERRED_PER_STEP = 32
"""Sequences that one step sets aside for a prefix in flight, which bounds the work of a step however many wait."""


class StepPlanner:
    """Builds one step after the other from the state of a scheduler."""

    def __init__(self, state: SchedulerState):
        self._state = state
        self._config = state.config
        self._cache = state.cache
        self._sequences = state.sequences
        self._log = state.log
        self._spaces = state.spaces
        self._interception = state.interception
        self._reclaimer = state.reclaimer
        self._services = state.services
        self._prompt_budget = state.config.max_step_tokens
        """Tokens of the step being built from which on prompts get none."""
        self._admission = Admission(state)

    # The step

    def plan(self, now: float) -> tuple[Step, InFlight]:
        """The next step and what its results will mean. An empty step must not be launched."""
        self._cache.retention.expire(now)
        step_id = self._state.last_step_id + 1
        self._sequences.queue.end_deferrals(step_id)
        self._interception.begin_step(now)
        if self._services.is_active:
            self._services.begin_step(now)
        builder = StepBuilder(step_id, self._sequences.slots, self._cache.page_size)
        self._reclaimer.begin_step(step_id, now)
        self._admission.num_promised = self._spaces.bring(now)
        try:
            self._add_decodes(builder, now)
            self._add_spaces(builder, now)
            if self._config.saturation_tokens is not None:
                self._prompt_budget = prompt_budget(self._config, builder.num_tokens, self._cache.page_size)
            self._add_prefills(builder, now, background=False)
            self._admit(builder, now, background=False)
            if self._services.is_active:
                self._add_prefills(builder, now, background=True)
                self._admit(builder, now, background=True)
                if self._services.has_held and not builder.num_tokens:
                    self._add_decodes(builder, now, alone=True)
        finally:
            self._spaces.end_step()
        if self._state.residency.moves:
            self._state.residency.advance(now)
        self._interception.end_step(now)
        if self._services.is_active:
            self._services.end_step(builder.in_flight)
        if builder.in_flight.recomputed_tokens:
            self._interception.recomputed.note(builder.in_flight.recomputed_tokens, now)
        if self._reclaimer.is_short:
            builder.in_flight.waits_for_pages = True
            builder.in_flight.intercepted_tokens = self._interception.tokens_on_device()
        copies = self._cache.take_copies()
        self._log.counters.swapped_out_pages += len(copies.swap_outs)
        self._log.counters.swapped_in_pages += len(copies.swap_ins)
        return builder.build(copies), builder.in_flight

    def _is_full(self, builder: StepBuilder, num_tokens: int) -> bool:
        rows = self._config.max_rows
        return builder.num_tokens >= num_tokens or (rows is not None and builder.num_rows >= rows)

    # Decoding

    def _add_decodes(self, builder: StepBuilder, now: float, *, alone: bool = False) -> None:
        """Add one token of every sequence that decodes; `alone`: nothing else is in the step, so none is held back."""
        slots, sequences = self._sequences.decoding()
        if not sequences:
            return
        table = self._sequences.slots
        index = slots.astype(np.intp)
        total = table.total[index]
        ready = total < table.end[index]
        if self._services.is_active and not alone:
            room = prompt_budget(self._config, len(sequences), self._cache.page_size) - len(sequences)
            ready = self._services.ready_to_decode(slots, sequences, ready, room)
        growing = (ready & (total > table.room[index])).nonzero()[0].tolist()
        if growing:
            self._free_ahead([sequences[row] for row in growing], now)
        for row in growing:
            sequence = sequences[row]
            if sequence.slot == slots[row] and not self._own_last_page(sequence, now):
                ready[row] = False
        if self._sequences.decodes_changed:  # some were preempted to make room
            ready &= np.array([s.slot == slot for s, slot in zip(sequences, slots.tolist(), strict=True)], np.bool_)
        if np.count_nonzero(ready) < len(sequences):
            slots = slots[ready]
            sequences = [s for s, is_ready in zip(sequences, ready.tolist(), strict=True) if is_ready]
        if self._config.max_rows is not None and len(sequences) > self._config.max_rows:
            turn = (np.arange(self._config.max_rows) + builder.in_flight.step_id) % len(sequences)
            slots, sequences = slots[turn], [sequences[index] for index in turn]
        if sequences:
            if self._services.is_active:
                self._services.decodes(slots, sequences)
            builder.add_decodes(slots, sequences)

    def _free_ahead(self, sequences: list[Sequence], now: float) -> None:
        """Have the new pages of all these decoding sequences given up at once: that costs less than one by one."""
        page_size = self._cache.page_size
        num_new = sum([len(sequence.table.pages) * page_size < sequence.total for sequence in sequences])
        if num_new > 1:
            self._cache.tiers.free_ahead(num_new, now)

    def _own_last_page(self, sequence: Sequence, now: float) -> bool:
        """Make the place of a decoding sequence's next KV writable."""
        if not self._reclaimer.make_writable(sequence, sequence.total - 1, sequence.total, now):
            return False
        pages, page_size = sequence.table.pages, self._cache.page_size
        last = (sequence.total - 1) // page_size
        self._sequences.slots.set_own_page(sequence.slot, last, pages[last], len(pages) * page_size)
        return True

    # Explicit pages

    def _add_spaces(self, builder: StepBuilder, now: float) -> None:
        if not self._spaces.num_ready or self._is_full(builder, self._config.max_step_tokens):
            return
        begun = builder.num_tokens
        others_wait = len(self._sequences.queue) > 0 or self._sequences.num_prefilling > 0
        self._spaces.fill(builder, self._config.max_step_tokens - begun, others_wait, now, self._config.max_rows)
        self._log.counters.space_tokens += builder.num_tokens - begun

    # Prompts

    def _add_prefills(self, builder: StepBuilder, now: float, *, background: bool) -> None:
        if not self._sequences.num_prefilling:
            return
        running = self._sequences.running.values()
        prefilling = [s for s in running if not s.decoding and s.has_work and s.is_background == background]
        prefilling.sort(key=self._sequences.rank)
        for sequence in prefilling:
            if self._is_full(builder, self._prompt_budget):
                break
            if sequence.state is SequenceState.RUNNING:
                self._add_chunk(builder, sequence, now)

    def _add_chunk(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """Give a running sequence as many known tokens as budget and pages allow."""
        start = sequence.num_computed
        end = min(sequence.target, len(sequence.tokens), start + self._prompt_budget - builder.num_tokens)
        if sequence.is_background:
            end = start + self._services.chunk_tokens(sequence, end - start, self._cache.page_size)
        head = sequence.head
        scores = isinstance(head, AppendOp) and head.outputs is not None and head.outputs.logprobs is not None
        if scores:
            end = min(end, start + MAX_SCORE_ROWS - builder.num_score_rows)
        if sequence.masks:
            # All tokens of a row see the same.
            end = min(end, next_start(sequence.masks, start) or end)
        if end <= start or not self._reclaimer.make_writable(sequence, start, end, now):
            return
        samplers = []
        if end == sequence.total and isinstance(head, GenerateOp):
            samplers.append(sequence)
        if sequence.pending_forks:
            samplers += self._resolve_pending_forks(builder, sequence, end, now)
        builder.add_chunk(sequence, start, end, samplers)
        builder.num_score_rows += end - start if scores else 0
        if self._services.is_active:
            self._services.chunk(sequence, start, end, len(samplers))
        again = self._count_chunk(sequence, start, end, now)
        if again:
            builder.in_flight.recomputed_tokens += again
            builder.in_flight.recomputing_rows.append(builder.num_rows - 1)
        sequence.begin_kv(end)
        for sampler in samplers:
            self._begin_decoding(builder, sampler, now)

    def _count_chunk(self, sequence: Sequence, start: int, end: int, now: float) -> int:
        """Returns how many of the tokens had KV before."""
        known, again = sequence.high_water, 0
        if known > start:
            again = min(end, known) - start
            self._log.counters.recomputed_tokens += again
        self._log.counters.prefill_tokens += end - start
        sequence.sources.computed(start, end, known)
        if end > known:
            sequence.high_water = end
        if self._log.traces:
            self._log.trace(sequence, "chunk", now, end - start)
        return again

    def _begin_decoding(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """The sequence samples from this step's forward; from the next step on it decodes."""
        op = sequence.head
        if not isinstance(op, GenerateOp):
            raise TypeError(f"sequence {sequence.seq} samples without a generate")
        if op.tells_start:  # it came when its prompt was being computed already
            tell_start(self._state, sequence, op, now)
        slot = sequence.slot
        table = self._sequences.slots
        table.set_sampling(slot, op, sequence.total)
        table.set_pages(slot, sequence.table.pages)
        mask = mask_at(sequence.masks, sequence.total)
        table.set_mask(slot, None if mask is None else mask.hidden, self._cache.page_size)
        builder.add_slot_set(sampling_state(sequence, op))
        sequence.total += 1
        self._sequences.begin_decoding(sequence)

    # Forks that wait for their parent

    def _resolve_pending_forks(self, builder: StepBuilder, parent: Sequence, end: int, now: float) -> list[Sequence]:
        """Give the forks of `parent` its pages once it has computed what they share; return those that sample with it.

        `end` is how far the parent's chunk in this step goes.
        """
        sampling: list[Sequence] = []
        staying: list[Sequence] = []
        for child in parent.pending_forks:
            shared = child.fork_point
            if end < min(shared, parent.target):
                staying.append(child)
                continue
            child.parent = None
            # A row that an operation put on the child reports about has to be computed.
            limit = shared if child.reuse_limit is None else min(shared, child.reuse_limit)
            self._share_pages(builder, parent, child, min(end, limit))
            # The parent's row is the child's where neither has tokens of its own.
            same_row = end == shared == child.total
            samples = same_row and isinstance(child.head, GenerateOp) and self._sequences.slots.num_free > 0
            if samples:
                self._sequences.run(child, 1, now)
                self._admission.note_start(child, now)
                sampling.append(child)
            else:
                self._sequences.rewind(child, now)
                self._sequences.enqueue_or_idle(child, now)
                advance(self._state, child, now)
        parent.pending_forks = staying
        return sampling

    def _share_pages(self, builder: StepBuilder, parent: Sequence, child: Sequence, end: int) -> None:
        self._cache.close(child.table, child.last_active_s)
        child.table = self._cache.fork(parent.table, child.seq)
        child.adopt_kv(end, min(parent.num_written, end))
        child.sources.found(0, end, 0)
        child.sources.continued = end
        child.high_water = max(child.high_water, end)
        child.last_step = builder.in_flight.step_id
        builder.add_written(child, end)

    # Admission

    def _admit(self, builder: StepBuilder, now: float, *, background: bool) -> None:
        """Admit sequences from the queue until one is blocked; without `background`, the others alone."""
        later: list[Sequence] = []
        held: set[str] = set()
        """Tenants whose next sequence waits for those that they run."""
        warm_alone: set[str] = set()
        """Tenants whose next sequence waits for pages that waiting KV does not need: only what has KV goes on."""
        num_deferred, page_size = 0, self._cache.page_size
        while not self._is_full(builder, self._prompt_budget) and num_deferred < MAX_DEFERRED_PER_STEP:
            sequence = self._sequences.queue.pop(held, warm_alone)
            if sequence is None:
                break
            if sequence.num_pending or sequence.last_step > self._state.last_step_id:
                # A token is still on the device, or a page that this step writes would have to be copied by it.
                later.append(sequence)
                continue
            if self._reclaimer.preempted and self._reclaimer.gives_way(sequence):
                later.append(sequence)
                continue
            if sequence.is_background:
                is_promoted = sequence.service < LATENCY
                may_join = (background or is_promoted) and self._services.has_room(sequence, page_size)
                if not may_join:
                    later.append(sequence)
                    if is_promoted:
                        continue  # it stands among others
                    break
            verdict = self._admission.admit(sequence, now)
            if verdict == "deferred":
                num_deferred += 1
                continue
            if verdict == "returning":
                later.append(sequence)
                continue
            if verdict in ("held", "spared"):
                (held if verdict == "held" else warm_alone).add(sequence.tenant)
                later.append(sequence)
                continue
            if verdict == "blocked":
                later.append(sequence)
                break
            if sequence.has_work:
                self._add_chunk(builder, sequence, now)
            else:  # all that was to be computed was found
                self._sequences.stop_running(sequence)
                self._sequences.enqueue_or_idle(sequence, now)
                advance(self._state, sequence, now)
        for sequence in later:
            self._sequences.queue.push(sequence)
