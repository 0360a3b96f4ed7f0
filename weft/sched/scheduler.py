"""`Scheduler`: which tokens the next step computes.

`schedule(now)` returns a step; `update(step's meaning, result, now)` (in `outcome.py`) says what became true; the
operations of clients come in through `intake.py`. Where sequences are is the roster's (`roster.py`), who gives up pages
when they run out the reclaimer's (`reclaim.py`). Knows no device, no socket and no clock.

A step is filled in this order: one token for every decoding sequence, chunks of prompts already running, then
admissions from the queue, all in order of rank (`WaitingQueue.rank`) and within the token budget (Sarathi's stall-free
mixing).
"""

from __future__ import annotations

import msgspec
import numpy as np

from weft.cache.manager import KVCache
from weft.cache.radix import Match
from weft.core.step import Step
from weft.sched.batch import Chunk, InFlight, StepBuilder, sampling_state
from weft.sched.journal import Journal
from weft.sched.masks import mask_at, next_start
from weft.sched.reclaim import Reclaimer
from weft.sched.roster import Roster
from weft.sched.sequence import Append, Generate, Sequence, State
from weft.sched.spaces.place import Placer, PlacerSizes
from weft.sched.spaces.pool import SpacePool
from weft.sched.spaces.spaces import Spaces

MAX_DEFERRED_PER_STEP = 32
"""Sequences that one step sets aside for a prefix in flight, which bounds the work of a step however many wait."""
MAX_SCORE_ROWS = 128
"""Rows of full logits that one chunk may ask for, which bounds the memory of prompt log-probabilities."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a step, and a wait."""

    max_context: int
    max_running: int
    max_step_tokens: int
    """What the device has room for."""
    saturation_tokens: int | None = None
    """A step that has so many tokens gets no more of prompts: they would take proportionally longer, and decoding
    sequences would wait for them. At least `max_running` count. None: as many as fit."""
    max_waiting: int = 4096
    aging_s: float = 30.0
    prefix_cache: bool = True
    prefix_wait_steps: int = 64
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    seed: int = 0
    trace: bool = False
    space_fraction: float = 0.5
    """Of the device pages, how many may be in spaces."""
    alloc_wait_s: float = 5.0
    """How long a command waits for pages or embeddings."""
    max_rows: int | None = None
    """Sequences and commands that share a step. None: as many as fit."""
    num_device_slots: int | None = None
    """Device slots of the worker; those past `max_running` draw single tokens for spaces."""
    num_embeds: int = 0
    has_windows: bool = False
    """The model has layers with a sliding window, which explicit pages do not allow."""


class Scheduler:
    """See the module's docstring. Not safe for use from several threads."""

    def __init__(self, config: SchedulerConfig, cache: KVCache):
        self.config = config
        self.cache = cache
        self.roster = Roster(
            cache, max_running=config.max_running, max_context=config.max_context, aging_s=config.aging_s
        )
        self.journal = Journal(traces=config.trace)
        self.last_step_id = 0
        self.prompt_budget = prompt_budget(config)
        """Tokens of a step from which on prompts get none."""
        self._reclaimer = Reclaimer(cache, self.roster, self.journal, self.prompt_budget)
        self.spaces = _spaces(config, cache, self.journal, self._reclaimer)
        self._reclaimer.last_resort = self.spaces.end_youngest

    # The step

    def schedule(self, now: float) -> tuple[Step, InFlight]:
        """The next step and what its results will mean. An empty step must not be launched: `launched` is what counts
        it."""
        self.cache.retention.expire(now)
        step_id = self.last_step_id + 1
        self.roster.queue.end_deferrals(step_id)
        builder = StepBuilder(step_id, self.roster.slots, self.cache.page_size)
        self._reclaimer.begin_step(step_id, now)
        try:
            self._add_decodes(builder, now)
            self._add_spaces(builder, now)
            self._add_prefills(builder, now)
            self._admit(builder, now)
        finally:
            self.spaces.end_step()
        copies = self.cache.take_copies()
        self.journal.counters.swapped_out_pages += len(copies.swap_outs)
        self.journal.counters.swapped_in_pages += len(copies.swap_ins)
        return builder.build(copies), builder.in_flight

    def launched(self, step_id: int) -> None:
        """The step returned last is on its way."""
        self.last_step_id = step_id
        self.cache.tiers.step_launched(step_id)

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something, now or once steps in flight are done."""
        return bool(self.roster.running) or len(self.roster.queue) > 0 or self.spaces.has_work

    def _is_full(self, builder: StepBuilder, num_tokens: int) -> bool:
        rows = self.config.max_rows
        return builder.num_tokens >= num_tokens or (rows is not None and builder.num_rows >= rows)

    @property
    def num_ready(self) -> int:
        """Sequences and queues that a step could serve."""
        return len(self.roster.running) + len(self.roster.queue) + self.spaces.num_ready

    @property
    def is_turn_based(self) -> bool:
        """Whether all there is to do is turn-based: single commands of programs, which look at the answer before they
        go on. Then nothing is gained by building a step while another runs."""
        if self.roster.decoding().sequences:
            return False
        return self.roster.queue.is_turn_based and all(isinstance(s.head, Append) for s in self.roster.running.values())

    # Decoding

    def _add_decodes(self, builder: StepBuilder, now: float) -> None:
        slots, sequences = self.roster.decoding()
        if not sequences:
            return
        table = self.roster.slots
        ready = table.remaining[slots] > 0
        growing = ready & (
            ((table.total[slots] - 1) // self.cache.page_size >= table.num_pages[slots]) | table.must_own[slots]
        )
        for index in np.flatnonzero(growing):
            sequence = sequences[index]
            if sequence.slot == slots[index] and not self._own_last_page(sequence, now):
                ready[index] = False
        if self.roster.decodes_changed:  # some were preempted to make room
            ready &= np.array([s.slot == slot for s, slot in zip(sequences, slots.tolist(), strict=True)], np.bool_)
        if not ready.all():
            slots = slots[ready]
            sequences = [s for s, is_ready in zip(sequences, ready.tolist(), strict=True) if is_ready]
        if self.config.max_rows is not None and len(sequences) > self.config.max_rows:
            turn = (np.arange(self.config.max_rows) + builder.in_flight.step_id) % len(sequences)
            slots, sequences = slots[turn], [sequences[index] for index in turn]
        if sequences:
            builder.add_decodes(slots, sequences)

    def _own_last_page(self, sequence: Sequence, now: float) -> bool:
        """Make the place of a decoding sequence's next KV writable."""
        if not self._reclaimer.make_writable(sequence, sequence.total - 1, sequence.total, now):
            return False
        slot = sequence.slot
        pages = sequence.table.pages
        last = (sequence.total - 1) // self.cache.page_size
        table = self.roster.slots
        table.pages[slot, last] = pages[last]
        table.num_pages[slot] = len(pages)
        table.must_own[slot] = False
        return True

    # Explicit pages

    def _add_spaces(self, builder: StepBuilder, now: float) -> None:
        if self._is_full(builder, self.config.max_step_tokens):
            return
        begun = builder.num_tokens
        others_wait = len(self.roster.queue) > 0 or any(not s.decoding for s in self.roster.running.values())
        self.spaces.fill(builder, self.config.max_step_tokens - begun, others_wait, now, self.config.max_rows)
        self.journal.counters.space_tokens += builder.num_tokens - begun

    # Prompts

    def _add_prefills(self, builder: StepBuilder, now: float) -> None:
        prefilling = [s for s in self.roster.running.values() if not s.decoding and s.has_work]
        prefilling.sort(key=self.roster.rank)
        for sequence in prefilling:
            if self._is_full(builder, self.prompt_budget):
                break
            if sequence.state is State.RUNNING:
                self._add_chunk(builder, sequence, now)

    def _add_chunk(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """Give a running sequence as many known tokens as budget and pages allow."""
        start = sequence.num_computed
        end = min(sequence.target, len(sequence.tokens), start + self.prompt_budget - builder.num_tokens)
        head = sequence.head
        if isinstance(head, Append) and head.outputs is not None and head.outputs.logprobs is not None:
            end = min(end, start + MAX_SCORE_ROWS)
        if sequence.masks:
            # All tokens of a row see the same.
            end = min(end, next_start(sequence.masks, start) or end)
        if end <= start or not self._reclaimer.make_writable(sequence, start, end, now):
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
        self.journal.counters.prefill_tokens += end - start
        self.journal.counters.recomputed_tokens += max(0, min(end, sequence.high_water) - start)
        sequence.high_water = max(sequence.high_water, end)
        self.journal.trace(sequence, "chunk", now, end - start)

    def _begin_decoding(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """The sequence samples from this step's forward; from the next step on it decodes."""
        op = sequence.head
        if not isinstance(op, Generate):
            raise TypeError(f"sequence {sequence.seq} samples without a generate")
        slot = sequence.slot
        table = self.roster.slots
        table.set_sampling(slot, op)
        table.total[slot] = sequence.total
        table.set_pages(slot, sequence.table.pages)
        mask = mask_at(sequence.masks, sequence.total)
        table.set_mask(slot, None if mask is None else mask.hidden, self.cache.page_size)
        table.must_own[slot] = True
        builder.add_slot_set(sampling_state(sequence, op))
        sequence.total += 1
        self.roster.begin_decoding(sequence)

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
            # The parent's row is the child's where neither has tokens of its own.
            same_row = end == shared == child.total
            samples = same_row and isinstance(child.head, Generate) and self.roster.slots.num_free > 0
            if samples:
                self.roster.run(child, 1, now)
                sampling.append(child)
            else:
                self.roster.rewind(child, now)
                self.roster.enqueue_or_rest(child, now)
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
        num_deferred = 0
        while not self._is_full(builder, self.prompt_budget) and num_deferred < MAX_DEFERRED_PER_STEP:
            sequence = self.roster.queue.pop()
            if sequence is None:
                break
            if sequence.num_pending or sequence.last_step > self.last_step_id:
                # A token is still on the device, or a page that this step writes would have to be copied by it.
                later.append(sequence)
                continue
            verdict = self._try_admit(sequence, now)
            if verdict == "deferred":
                num_deferred += 1
                continue
            if verdict == "blocked":
                later.append(sequence)
                break
            if sequence.has_work:
                self._add_chunk(builder, sequence, now)
            else:  # all that was to be computed ahead was found
                self.roster.stop_running(sequence)
                self.roster.enqueue_or_rest(sequence, now)
        for sequence in later:
            self.roster.queue.push(sequence)

    def _try_admit(self, sequence: Sequence, now: float) -> str:
        """Admit the first in the queue, defer it, or find that it blocks the queue."""
        tokens = b""
        match = None
        if not sequence.num_computed and not sequence.table.pages and self.config.prefix_cache:
            limit = self._reuse_limit(sequence)
            tokens = sequence.tokens.tobytes()
            match = self.cache.lookup(sequence.table, tokens, limit)
            if self._defer(sequence, match, tokens, limit):
                return "deferred"
        cost = (
            self.cache.acquire_cost(match, sequence.total)
            if match is not None
            else self.cache.write_cost(sequence.table, sequence.num_computed, sequence.total)
        )
        if not self._reclaimer.make_room(sequence, cost, now):
            return "blocked"
        found = sequence.num_computed if match is None else match.num_pages * self.cache.page_size
        self.roster.run(sequence, sequence.total - found, now)
        if match is not None:
            limit = self._reuse_limit(sequence)
            self._reuse(sequence, self.cache.acquire(sequence.table, match, tokens, limit, now), now)
            if sequence.reuse_limit is None:
                self.cache.announce(sequence.table, tokens, sequence.num_plain)
        return "admitted"

    def _defer(self, sequence: Sequence, match: Match, tokens: bytes, limit: int) -> bool:
        """Whether a sequence waits for a prefix that another one is computing. Without progress of that prefix it waits
        for `prefix_wait_steps` at most, however often it is looked at."""
        place, step_id = sequence.place, self.last_step_id + 1
        if place.defer_until_step < 0 or match.num_pages > place.deferred_pages:
            until_step = step_id + self.config.prefix_wait_steps
        elif step_id < place.defer_until_step:
            until_step = place.defer_until_step
        else:
            return False
        found = self.cache.in_flight(sequence.table, match, tokens, limit)
        if found is None:
            return False
        place.deferred_pages, place.defer_until_step = match.num_pages, until_step
        self.roster.queue.defer(sequence, found.seq, found.num_pages, until_step)
        return True

    def _reuse_limit(self, sequence: Sequence) -> int:
        """How many tokens may come from the prefix index: one at least is left to compute."""
        limit = min(len(sequence.tokens) - 1, sequence.num_plain)
        limit = limit if sequence.reuse_limit is None else min(limit, sequence.reuse_limit)
        return max(limit, 0)

    def _reuse(self, sequence: Sequence, cached: int, now: float) -> None:
        sequence.num_computed = sequence.num_written = cached
        if sequence.high_water == 0:
            sequence.num_cached = cached
            self.journal.counters.prefix_queries += len(sequence.tokens)
            self.journal.counters.prefix_hits += cached
            sequence.high_water = cached
        self.journal.trace(sequence, "scheduled", now, cached)


def prompt_budget(config: SchedulerConfig) -> int:
    """Tokens of a step from which on prompts get none: what running sequences may need always leaves room for some, but
    never more than there is."""
    if config.saturation_tokens is None:
        return config.max_step_tokens
    return min(max(config.saturation_tokens, config.max_running), config.max_step_tokens)


def _spaces(config: SchedulerConfig, cache: KVCache, journal: Journal, reclaimer: Reclaimer) -> Spaces:
    num_slots = config.max_running if config.num_device_slots is None else config.num_device_slots
    pool = SpacePool(
        cache, int(cache.tiers.device.num_pages * config.space_fraction), config.num_embeds, reclaimer.make_free
    )
    sizes = PlacerSizes(
        page_size=cache.page_size,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        max_inputs=max(config.max_step_tokens - config.max_running, config.max_step_tokens // 2, 1),
    )
    refusal = "explicit pages are not supported for models with sliding windows; use sequences" * config.has_windows
    placer = Placer(pool, sizes=sizes, slots=range(config.max_running, num_slots))
    return Spaces(pool, placer, journal, aging_s=config.aging_s, alloc_wait_s=config.alloc_wait_s, refusal=refusal)
