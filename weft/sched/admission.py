"""`Admission`: whether a waiting sequence starts, and with which KV.

A sequence starts with what the prefix index has of its tokens, and waits, bounded, for what another one is computing.
That goes for new sequences, for those that have given their pages up, and for forks that have kept them and go on with
the same tokens.

Reads and changes `SchedulerState`. Called by the step planner, which decides who is next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from weft.cache.manager import Acquired
from weft.cache.radix import Match
from weft.sched.operations import tell_start
from weft.sched.reclaim import Room
from weft.sched.sequence import AppendOp, GenerateOp, Sequence
from weft.sched.state import SchedulerState

Verdict = Literal["admitted", "deferred", "returning", "held", "spared", "blocked"]
"""`deferred`: it waits for a prefix that another one computes; `returning`: more of its pages come from the host;
`held`, `spared`, `blocked`: there is no room, for its tenant, for those of its tenant whose KV is gone or that are new,
or for any that comes after it."""


VERDICTS: Mapping[Room, Verdict] = {"none": "blocked", "beyond_share": "held", "spared": "spared"}


class Admission:
    """Admits one sequence after the other to the step that is being built."""

    def __init__(self, state: SchedulerState):
        self._state = state
        self._config = state.config
        self._cache = state.cache
        self._sequences = state.sequences
        self._interception = state.interception
        self._reclaimer = state.reclaimer
        self._log = state.log
        self._has_host = state.cache.tiers.host.num_pages > 0
        self.num_promised = 0
        """Pages that sequences and a space still need which have a part of their pages and wait for the rest from the
        host."""

    def admit(self, sequence: Sequence, now: float) -> Verdict:
        """Admit the first in the queue, defer it, bring more of its pages from the host, or find that it blocks the
        queue, for all or for its tenant."""
        tokens = b""
        match = None
        limit = num_reshaped = 0
        is_fresh = not sequence.num_computed and not sequence.table.pages
        may_look = self._config.prefix_cache or sequence.wait is not None
        has_many_new = len(sequence.tokens) - sequence.num_computed > self._cache.least_common
        stands_with_others = has_many_new and bool(sequence.table.pages) and self._stands_with_others(sequence)
        if sequence.returning or (is_fresh and may_look) or stands_with_others:
            limit = self._reuse_limit(sequence)
            tokens = sequence.index_keys.tobytes()
            match = self._cache.lookup(sequence.table, tokens, limit)
            num_reshaped = self._cache.tiers.num_reshaped
            # One that has come back, or that has kept its pages, holds little but what the other one holds too.
            if (is_fresh or not match.on_host) and self._defer(sequence, match, tokens, limit):
                return "deferred"
            if stands_with_others and not self._gains(sequence, match, tokens, limit):
                match = None
        cost = (
            self._cache.acquire_cost(match, sequence.total)
            if match is not None
            else self._cache.write_cost(sequence.table, sequence.num_computed, sequence.total)
        )
        room = self._reclaimer.make_room(sequence, cost, self.num_promised, now)
        if room != "enough":
            return VERDICTS[room]
        if match is not None and num_reshaped != self._cache.tiers.num_reshaped:
            match = self._cache.lookup(sequence.table, tokens, limit)
            if stands_with_others and not self._gains(sequence, match, tokens, limit):
                match = None  # it was given up for this one's room, which its own tokens get as they are computed
        if match is None and sequence.table.pages and not self._sequences.running and self._cannot_copy(sequence, cost):
            self._sequences.cut_to_index(sequence, now)
        if match is not None and stands_with_others:
            self._sequences.cut_to_index(sequence, now)
        if match is not None and self._has_host and self._must_come(sequence, match, tokens, limit, cost, now):
            if self._bring(sequence, match, tokens, limit, cost, now):
                return "returning"
            match = self._cache.lookup(sequence.table, tokens, limit)
        found = sequence.num_computed if match is None else match.num_pages * self._cache.page_size
        self._sequences.run(sequence, sequence.total - found, now)
        arrival_s = now  # of no use where no KV was looked for
        if match is not None:
            arrival_s = _arrival_s(sequence, now)
            if not stands_with_others:
                self._interception.closed.end_continued(sequence, match, tokens, arrival_s)
            is_own = sequence.wait is not None
            if is_own:
                self._interception.unpark(sequence, now)
            sequence.returning = False
            acquired = self._cache.acquire(sequence.table, match, tokens, limit, now, is_own=is_own)
            self._reuse(sequence, acquired, tokens, arrival_s)
            sequence.has_partial = False
        if tokens and sequence.reuse_limit is None:
            self._cache.announce(sequence.table, tokens, len(sequence.tokens))
        if sequence.continues is not None:
            self._interception.closed.let_go(sequence)
        if sequence.returned_kind:
            self._interception.count_return(sequence, now - arrival_s)
        self.note_start(sequence, now)
        return "admitted"

    def _cannot_copy(self, sequence: Sequence, cost: int) -> bool:
        """Whether a sequence beside which nothing runs was cut within a page that others find, or have too, and gets no
        page to copy it to, because its own KV fills the device: then it computes these tokens again."""
        num_new = -(-sequence.total // self._cache.page_size) - len(sequence.table.pages)
        return cost > self._cache.num_soon and cost > max(num_new, 0)

    def note_start(self, sequence: Sequence, now: float) -> None:
        """A sequence got a slot: tell its client, if that is to be told, and note it where traces are on, with how many
        tokens that have KV, and how many of these go on from other KV."""
        head = sequence.head
        if isinstance(head, GenerateOp) and head.tells_start:
            tell_start(self._state, sequence, head, now)
        if not self._log.traces:
            return
        found = sequence.sources.counts(len(sequence.tokens))
        self._log.trace(sequence, "scheduled", now, found.cached)
        if found.continued:
            self._log.trace(sequence, "continued", now, found.continued)

    def _must_come(self, sequence: Sequence, match: Match, tokens: bytes, limit: int, cost: int, now: float) -> bool:
        """Whether pages of a waiting sequence are still to come from the host, or come with the step being built."""
        has_pages, broke = match.on_host or sequence.returning, False
        while has_pages and (missing := cost - self._cache.num_soon) > 0:
            # Nothing else runs, and it would break pins as it writes.
            if not self._cache.retention.break_pin(missing, now):
                break
            broke = True
        copies = self._cache.tiers.copies
        is_held = broke and copies.completed < copies.launched  # a step in flight holds the pages of a pin
        if match.on_host or is_held or self._cache.is_arriving(match):
            return True
        return self._bring_partial(sequence, match, tokens, limit, now)

    def _bring(self, sequence: Sequence, match: Match, tokens: bytes, limit: int, cost: int, now: float) -> bool:
        """Bring pages of a waiting sequence from the host, as many as this step's budget of copies has left. It runs in
        a later step: a forward does not wait for the link.

        Where nothing else runs, one may start that needs more than there is (`Reclaimer.make_room`). What there is room
        for comes first: False, once nothing more can come.
        """
        missing = cost - self._cache.num_soon
        if not sequence.returning:
            sequence.returning = True
            self._sequences.queue.order.begun(sequence)
        available = self._cache.num_available
        # With a later step, whose budget is another, or when the steps in flight are done.
        may_come = self._cache.tiers.copy_budget <= 0 or self._cache.tiers.device.num_fenced > 0
        whole = match.num_pages * self._cache.page_size
        found = self._cache.acquire(sequence.table, match, tokens, whole, now, is_own=sequence.wait is not None)
        sequence.sources.found(sequence.num_computed, found.num_tokens, found.num_from_host)
        sequence.adopt_kv(found.num_tokens, found.num_tokens)
        if found.num_tokens == whole:
            self._bring_partial(sequence, self._cache.lookup(sequence.table, tokens, limit), tokens, limit, now)
        sequence.last_active_s = now
        self._sequences.without_slot[sequence.seq] = sequence
        if missing > 0 and match.on_host and not (may_come or found.num_from_host):
            return False
        self.num_promised += max(0, cost - (available - self._cache.num_available))
        return True

    def _bring_partial(self, sequence: Sequence, match: Match, tokens: bytes, limit: int, now: float) -> bool:
        """Whether the page that only begins with the tokens of a waiting sequence comes from the host with this step:
        once, so that others who need the room cannot keep the sequence from going on."""
        if sequence.has_partial:
            return False
        sequence.has_partial = self._cache.bring_partial(sequence.table, match, tokens, limit, now)
        return sequence.has_partial

    def _defer(self, sequence: Sequence, match: Match, tokens: bytes, limit: int) -> bool:
        """Whether a sequence waits for a prefix that another one is computing. Without progress of that prefix it waits
        for `prefix_wait_steps` at most, however often it is looked at."""
        place, step_id = sequence.place, self._state.last_step_id + 1
        if place.defer_until_step < 0 or match.num_pages > place.deferred_pages:
            until_step = step_id + self._config.prefix_wait_steps
        elif step_id < place.defer_until_step:
            until_step = place.defer_until_step
        else:
            return False
        found = self._cache.in_flight(sequence.table, match, tokens, limit, sequence.num_computed)
        if found is None:
            return False
        place.deferred_pages, place.defer_until_step = match.num_pages, until_step
        self._sequences.queue.defer(sequence, found.seq, found.num_pages, until_step)
        return True

    def _stands_with_others(self, sequence: Sequence) -> bool:
        """Whether a sequence that has kept pages may find KV of the tokens that follow them: other sequences, as
        its forks, stand at the same node of the prefix index, or have gone on from there."""
        table = sequence.table
        if not (table.node.locks > 1 or table.node.children) or sequence.returning:
            return False
        may_look = self._config.prefix_cache and sequence.reuse_limit is None and table.indexable
        has_more = len(table.pages) > table.num_indexed + 1 or sequence.num_written < sequence.num_computed
        return may_look and not has_more

    def _gains(self, sequence: Sequence, match: Match, tokens: bytes, limit: int) -> bool:
        """Whether a match has `KVCache.least_common` tokens of KV more than a sequence that has kept its pages."""
        num_found = self._cache.num_found(sequence.table, match, tokens, limit)
        return num_found >= sequence.num_computed + self._cache.least_common

    def _reuse_limit(self, sequence: Sequence) -> int:
        """How many tokens may come from the prefix index: one at least is left to compute."""
        limit = len(sequence.tokens) - 1
        limit = limit if sequence.reuse_limit is None else min(limit, sequence.reuse_limit)
        return max(limit, 0)

    def _reuse(self, sequence: Sequence, found: Acquired, tokens: bytes, arrival_s: float) -> None:
        cached = found.num_tokens
        tail = cached % self._cache.page_size if sequence.has_partial else 0
        from_host = max(found.num_from_host, tail)
        sequence.sources.found(sequence.num_computed, cached, from_host)
        sequence.adopt_kv(cached, cached)
        if sequence.high_water == 0:
            self._log.counters.prefix_queries += len(sequence.tokens)
            self._log.counters.prefix_hits += cached
            self._interception.closed.first_found(sequence, tokens, cached, arrival_s)


def _arrival_s(sequence: Sequence, now: float) -> float:
    """When the operation under way arrived."""
    head = sequence.head
    return head.arrival_s if isinstance(head, AppendOp | GenerateOp) else now
