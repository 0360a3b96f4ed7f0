"""`Scheduler`: which tokens the next step computes.

`schedule(now)` returns a step; `update(step's meaning, result, now)` (in `outcome.py`) says what became true; the
operations of clients come in through `intake.py`. Owns the queue, the slots and who holds pages. Knows no device, no
socket and no clock.

A step is filled in this order: one token for every decoding sequence, chunks of prompts already running, then
admissions from the queue, all in order of rank (`WaitingQueue.rank`) and within the token budget (Sarathi's stall-free
mixing). When pages run out, sequences at rest give theirs up first, then waiting ones, then running ones of later rank
than the one that needs them: what was full stays in the prefix index while it can, the rest is recomputed. So the
first in rank always gets on, and all others after it.
"""

from __future__ import annotations

import msgspec
import numpy as np

from weft.cache.manager import KVCache
from weft.core.step import I32, Step
from weft.core.wire import Event, TraceSpan
from weft.sched.batch import Chunk, InFlight, StepBuilder, sampling_state
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import Append, Generate, Sequence, State
from weft.sched.slots import SlotTable

MAX_SCORE_ROWS = 128
"""Rows of full logits that one chunk may ask for, which bounds the memory of prompt log-probabilities."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a step, and a wait."""

    max_context: int
    max_running: int
    max_step_tokens: int
    max_waiting: int = 4096
    aging_s: float = 30.0
    prefix_cache: bool = True
    prefix_wait_steps: int = 64
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    seed: int = 0
    trace: bool = False


class Counters:
    """What grows for the engine's life; `EngineStats` is its frozen picture."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        self.generated_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.swapped_in_pages = 0
        self.swapped_out_pages = 0
        self.finished: dict[str, int] = {}


class Scheduler:
    """See the module's docstring. Not safe for use from several threads."""

    def __init__(self, config: SchedulerConfig, cache: KVCache):
        self.config = config
        self.cache = cache
        self.queue = WaitingQueue(config.aging_s)
        self.slots = SlotTable(config.max_running, -(-config.max_context // cache.page_size) + 1)
        self.running: dict[int, Sequence] = {}
        """By slot."""
        self.resting: dict[int, Sequence] = {}
        """Sequences with pages and without a slot, by number, least recently active first."""
        self.counters = Counters()
        self.outbox: list[tuple[int, Event]] = []
        """(client, event), in order; the engine takes them."""
        self.last_step_id = 0
        self._decode_slots: I32 = np.empty(0, np.int32)
        self._decode_sequences: list[Sequence] = []
        self._decodes_changed = False
        self._pressed: Sequence | None = None
        """Had to wait for room that sequences of later rank in the same step were holding."""

    # The step

    def schedule(self, now: float) -> tuple[Step, InFlight]:
        """The next step and what its results will mean. An empty step must not be launched: `launched` is what counts
        it."""
        self.cache.retention.expire(now)
        step_id = self.last_step_id + 1
        self.queue.unpark_due(step_id)
        builder = StepBuilder(step_id, self.slots, self.cache.page_size)
        self._relieve(now)
        self._add_decodes(builder, now)
        self._add_prefills(builder, now)
        self._admit(builder, now)
        copies = self.cache.take_copies()
        self.counters.swapped_out_pages += len(copies.swap_outs)
        self.counters.swapped_in_pages += len(copies.swap_ins)
        return builder.build(copies), builder.in_flight

    def launched(self, step_id: int) -> None:
        """The step returned last is on its way."""
        self.last_step_id = step_id
        self.cache.tiers.step_launched(step_id)

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something, now or once steps in flight are done."""
        return bool(self.running) or len(self.queue) > 0

    def _relieve(self, now: float) -> None:
        """Make room for whom the last step left without, while nothing is in this step that could not be preempted."""
        sequence, self._pressed = self._pressed, None
        if sequence is None:
            return
        if sequence.state is State.RUNNING and not sequence.decoding:
            start = sequence.num_computed
            end = min(sequence.target, len(sequence.tokens), start + self.config.max_step_tokens)
            if start < end:
                self._make_writable(sequence, start, end, now)
        elif sequence.state is State.WAITING:
            self._make_room(sequence, self.cache.write_cost(sequence.table, sequence.num_computed, sequence.total), now)

    # Decoding

    def _add_decodes(self, builder: StepBuilder, now: float) -> None:
        if self._decodes_changed:
            self._order_decodes()
        slots, sequences = self._decode_slots, self._decode_sequences
        if not len(slots):
            return
        table = self.slots
        ready = table.remaining[slots] > 0
        growing = ready & (
            ((table.total[slots] - 1) // self.cache.page_size >= table.num_pages[slots]) | table.must_own[slots]
        )
        for index in np.flatnonzero(growing):
            sequence = sequences[index]
            if sequence.slot == slots[index] and not self._own_last_page(sequence, now):
                ready[index] = False
        if self._decodes_changed:  # some were preempted to make room
            ready &= np.array([s.slot == slot for s, slot in zip(sequences, slots.tolist(), strict=True)], np.bool_)
        if not ready.all():
            slots = slots[ready]
            sequences = [s for s, is_ready in zip(sequences, ready.tolist(), strict=True) if is_ready]
        if sequences:
            builder.add_decodes(slots, sequences)

    def _own_last_page(self, sequence: Sequence, now: float) -> bool:
        """Make the place of a decoding sequence's next KV writable."""
        if not self._make_writable(sequence, sequence.total - 1, sequence.total, now):
            return False
        slot = sequence.slot
        pages = sequence.table.pages
        last = (sequence.total - 1) // self.cache.page_size
        self.slots.pages[slot, last] = pages[last]
        self.slots.num_pages[slot] = len(pages)
        self.slots.must_own[slot] = False
        return True

    def _order_decodes(self) -> None:
        decoding = [s for s in self.running.values() if s.decoding]
        decoding.sort(key=self.queue.rank)
        self._decode_sequences = decoding
        self._decode_slots = np.array([s.slot for s in decoding], np.int32)
        self._decodes_changed = False

    # Prompts

    def _add_prefills(self, builder: StepBuilder, now: float) -> None:
        prefilling = [s for s in self.running.values() if not s.decoding and s.has_work]
        prefilling.sort(key=self.queue.rank)
        for sequence in prefilling:
            if builder.num_tokens >= self.config.max_step_tokens:
                break
            if sequence.state is State.RUNNING:
                self._add_chunk(builder, sequence, now)

    def _add_chunk(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """Give a running sequence as many known tokens as budget and pages allow."""
        start = sequence.num_computed
        end = min(sequence.target, len(sequence.tokens), start + self.config.max_step_tokens - builder.num_tokens)
        head = sequence.head
        if isinstance(head, Append) and head.outputs is not None and head.outputs.logprobs is not None:
            end = min(end, start + MAX_SCORE_ROWS)
        if end <= start or not self._make_writable(sequence, start, end, now):
            return
        samplers = []
        if end == sequence.total and isinstance(head, Generate):
            samplers.append(sequence)
        samplers += self._resolve_followers(builder, sequence, end, now)
        builder.add_chunk(Chunk(sequence, start, end, samplers))
        self._count_chunk(sequence, start, end, now)
        sequence.num_computed = end
        for sampler in samplers:
            self._begin_decoding(builder, sampler, now)

    def _count_chunk(self, sequence: Sequence, start: int, end: int, now: float) -> None:
        self.counters.prefill_tokens += end - start
        self.counters.recomputed_tokens += max(0, min(end, sequence.high_water) - start)
        sequence.high_water = max(sequence.high_water, end)
        self.trace(sequence, "chunk", now, end - start)

    def _begin_decoding(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """The sequence samples from this step's forward; from the next step on it decodes."""
        op = sequence.head
        if not isinstance(op, Generate):
            raise TypeError(f"sequence {sequence.seq} samples without a generate")
        slot = sequence.slot
        self.slots.set_sampling(slot, op)
        self.slots.total[slot] = sequence.total
        self.slots.set_pages(slot, sequence.table.pages)
        self.slots.must_own[slot] = True
        builder.add_slot_set(sampling_state(sequence, op))
        sequence.total += 1
        sequence.decoding = True
        self._decodes_changed = True

    # Forks that wait for their parent

    def _resolve_followers(self, builder: StepBuilder, parent: Sequence, end: int, now: float) -> list[Sequence]:
        """Give the forks of `parent` its pages once it has computed what they share; return those that sample with it.

        `end` is how far the parent's chunk in this step goes.
        """
        sampling: list[Sequence] = []
        staying: list[Sequence] = []
        for child in parent.followers:
            shared = child.fork_point
            if end < min(shared, parent.target):
                staying.append(child)
                continue
            child.parent = None
            self._share_pages(builder, parent, child, min(end, shared))
            samples = end == child.total and isinstance(child.head, Generate) and self.slots.num_free > 0
            if samples:
                self._run(child, now)
                sampling.append(child)
            else:
                self.trim(child, now)
                self.enqueue_or_rest(child, now)
        parent.followers = staying
        return sampling

    def _share_pages(self, builder: StepBuilder, parent: Sequence, child: Sequence, end: int) -> None:
        self.cache.close(child.table, child.last_active_s)
        child.table = self.cache.fork(parent.table, child.seq)
        child.num_computed = end
        child.num_written = min(parent.num_written, end)
        child.num_cached = max(child.num_cached, end)
        child.high_water = max(child.high_water, end)
        child.last_step = builder.in_flight.step_id
        builder.add_written(child, end)

    # Admission

    def _admit(self, builder: StepBuilder, now: float) -> None:
        later: list[Sequence] = []
        while builder.num_tokens < self.config.max_step_tokens:
            sequence = self.queue.pop()
            if sequence is None:
                break
            if sequence.num_pending or sequence.last_step > self.last_step_id:
                # A token is still on the device, or a page that this step writes would have to be copied by it.
                later.append(sequence)
                continue
            verdict = self._try_admit(sequence, now)
            if verdict == "parked":
                continue
            if verdict == "blocked":
                later.append(sequence)
                break
            if sequence.has_work:
                self._add_chunk(builder, sequence, now)
            else:  # all that was to be computed ahead was found
                self.stop_running(sequence)
                self.enqueue_or_rest(sequence, now)
        for sequence in later:
            self.queue.push(sequence)

    def _try_admit(self, sequence: Sequence, now: float) -> str:
        """Admit the first in the queue, park it, or find that it blocks the queue."""
        tokens = b""
        match = None
        if not sequence.num_computed and not sequence.table.pages and self.config.prefix_cache:
            limit = len(sequence.tokens) - 1
            limit = limit if sequence.reuse_limit is None else min(limit, sequence.reuse_limit)
            tokens = sequence.tokens.tobytes()
            match = self.cache.lookup(sequence.table, tokens, max(limit, 0))
            claimant = None if sequence.no_parking else self.cache.claimant(sequence.table, match, tokens)
            if claimant is not None and (limit - match.num_pages * self.cache.page_size) > self.cache.page_size // 2:
                self.queue.park(sequence, claimant, self.last_step_id + 1 + self.config.prefix_wait_steps)
                return "parked"
        cost = (
            self.cache.acquire_cost(match, sequence.total)
            if match is not None
            else self.cache.write_cost(sequence.table, sequence.num_computed, sequence.total)
        )
        if not self._make_room(sequence, cost, now):
            return "blocked"
        self._run(sequence, now)
        if match is not None:
            limit = len(sequence.tokens) - 1
            limit = limit if sequence.reuse_limit is None else max(min(limit, sequence.reuse_limit), 0)
            self._reuse(sequence, self.cache.acquire(sequence.table, match, tokens, limit, now), now)
            if sequence.reuse_limit is None:
                self.cache.claim(sequence.table, tokens, len(sequence.tokens))
        return "admitted"

    def _reuse(self, sequence: Sequence, cached: int, now: float) -> None:
        sequence.num_computed = sequence.num_written = cached
        if sequence.high_water == 0:
            sequence.num_cached = cached
            self.counters.prefix_queries += len(sequence.tokens)
            self.counters.prefix_hits += cached
            sequence.high_water = cached
        self.trace(sequence, "scheduled", now, cached)

    def _make_room(self, sequence: Sequence, cost: int, now: float) -> bool:
        """Whether a sequence may start: a slot, and pages for all it has, with one to spare for each that runs."""
        while True:
            enough = not self.running or self.cache.num_available >= cost + len(self.running)
            if self.slots.num_free and enough:
                return True
            if not enough and self._resting_pages_suffice(cost) and self._rest_victim(sequence, now):
                continue
            victim = max(self.running.values(), key=self.queue.rank, default=None)
            if victim is None or victim.priority <= sequence.priority:
                return False
            if self.queue.rank(victim) < self.queue.rank(sequence):
                return False
            if victim.last_step > self.last_step_id:
                self._pressed = sequence
                return False
            self.preempt(victim, now)

    def _resting_pages_suffice(self, cost: int) -> bool:
        """Whether taking pages from sequences at rest could be enough: else they keep theirs."""
        resting = sum(len(sequence.table.pages) for sequence in self.resting.values())
        return self.cache.num_available + resting >= cost + len(self.running)

    def _run(self, sequence: Sequence, now: float) -> None:
        sequence.slot = self.slots.take()
        self.running[sequence.slot] = sequence
        self.resting.pop(sequence.seq, None)
        sequence.move_to(State.RUNNING)
        sequence.no_parking = False
        sequence.last_active_s = now
        head = sequence.head
        if isinstance(head, Generate) and head.first_launch_s is None:
            head.first_launch_s = now

    # Pages

    def _make_writable(self, sequence: Sequence, start: int, end: int, now: float) -> bool:
        """Pages for tokens `start` to `end`, taken from others where none are free. False: not in this step."""
        while not self.cache.prepare_write(sequence.table, start, end, now):
            if self.cache.num_soon >= self.cache.write_cost(sequence.table, start, end):
                return False  # pages are on their way, held back by the steps in flight
            if self._rest_victim(sequence, now):
                continue
            victim = max(self.running.values(), key=self.queue.rank)
            if victim is not sequence and self.queue.rank(victim) > self.queue.rank(sequence):
                if victim.last_step > self.last_step_id:
                    self._pressed = sequence
                    return False
                self.preempt(victim, now)
            elif not self.cache.retention.break_pins(now):
                return False
        return True

    def _rest_victim(self, needy: Sequence, now: float) -> bool:
        """Take the pages of one sequence that is not running: at rest the longest, else last in the queue."""
        idle = next((s for s in self.resting.values() if s.state is State.IDLE and s is not needy), None)
        victim = idle or max((s for s in self.resting.values() if s is not needy), key=self.queue.rank, default=None)
        if victim is None:
            return False
        self.discard(victim, now)
        return True

    def preempt(self, victim: Sequence, now: float) -> None:
        """Stop a running sequence and take its pages; it is recomputed when its turn comes."""
        self.counters.preemptions += 1
        head = victim.head
        if isinstance(head, Generate):
            head.num_preemptions += 1
        self.trace(victim, "preempted", now, victim.num_computed)
        self.stop_running(victim)
        self.discard(victim, now)
        self.queue.push(victim)

    def discard(self, sequence: Sequence, now: float) -> None:
        """Give back a sequence's pages; its tokens stay, to be computed again. Forks that follow it go on alone."""
        self.free_followers(sequence, now)
        self.queue.unpark(sequence.seq)
        self.cache.free(sequence.table, sequence.tokens, min(sequence.num_written, len(sequence.tokens)), now)
        sequence.num_computed = sequence.num_written = 0
        sequence.kv_epoch += 1
        head = sequence.head
        if isinstance(head, Append):
            head.hidden, head.hidden_done = None, 0
        self.resting.pop(sequence.seq, None)

    def free_followers(self, parent: Sequence, now: float) -> None:
        """`parent` will not compute what its forks wait for."""
        for child in parent.followers:
            child.parent = None
            self.enqueue_or_rest(child, now)
        parent.followers = []

    def trim(self, sequence: Sequence, now: float) -> None:
        """Leave the last token of a sequence without KV, as of one at rest, and drop pages past it."""
        keep = max(0, min(sequence.num_computed, len(sequence.tokens) - 1))
        if keep < sequence.num_computed:
            sequence.kv_epoch += 1
        sequence.num_computed = keep
        sequence.num_written = min(sequence.num_written, keep)
        self.cache.truncate(sequence.table, keep, now)

    # States

    def stop_running(self, sequence: Sequence) -> None:
        """Take a running sequence's slot away. Results in flight stay valid."""
        if sequence.slot >= 0:
            del self.running[sequence.slot]
            self.slots.give_back(sequence.slot)
            sequence.slot = -1
            sequence.decoding = False
            self._decodes_changed = True
        self.cache.unclaim(sequence.table)
        self.queue.unpark(sequence.seq)

    def enqueue_or_rest(self, sequence: Sequence, now: float) -> None:
        """Put a sequence without a slot where it belongs."""
        sequence.last_active_s = now
        if sequence.table.pages:
            self.resting.pop(sequence.seq, None)
            self.resting[sequence.seq] = sequence
        if sequence.has_work:
            self.queue.push(sequence)
        else:
            self.queue.remove(sequence)
            sequence.move_to(State.IDLE)
            self.free_followers(sequence, now)

    # Seen from outside

    def trace(self, sequence: Sequence, what: str, now: float, detail: int = 0) -> None:
        """Note a moment of a request's life, where traces are on."""
        if self.config.trace:
            self.outbox.append((sequence.client, TraceSpan(sequence.request_id, what, now, detail)))
