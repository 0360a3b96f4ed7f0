"""`Reclaimer`: who gives up pages when a sequence needs room and too little is free.

Sequences at rest give theirs up first, the longest at rest before others; then waiting ones, the last in rank first;
then running ones of later rank than the one in need (*preemption*); and at last pins are broken. What was full stays
in the prefix index while it can, the rest is recomputed. So the first in rank always gets on, and all others after it.

Owns that order. Does not know why pages are wanted: the scheduler, which alone calls it, asks before it puts anything
into a step, because whoever computes something in the step being built can give up nothing. Then the one in need
waits, and is served before anything else of the next step is decided.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.cache.manager import KVCache
from weft.sched.journal import Journal
from weft.sched.roster import Roster
from weft.sched.sequence import Append, Generate, Sequence, State


class Reclaimer:
    """See the module's docstring."""

    def __init__(self, cache: KVCache, roster: Roster, journal: Journal, max_step_tokens: int):
        self._cache = cache
        self._roster = roster
        self._journal = journal
        self._max_step_tokens = max_step_tokens
        self._step_id = 0
        """The step being built."""
        self.last_resort: Callable[[float], bool] = lambda now: False
        """Called when nothing else is left to take: whether it has freed pages."""
        self._pressed: Sequence | None = None
        """Had to wait for room that sequences of later rank in the same step were holding."""

    def begin_step(self, step_id: int, now: float) -> None:
        """Make room for whom the last step left without, while nothing is in this step that could not be preempted."""
        self._step_id = step_id
        sequence, self._pressed = self._pressed, None
        if sequence is None:
            return
        if sequence.state is State.RUNNING and not sequence.decoding:
            start = sequence.num_computed
            end = min(sequence.target, len(sequence.tokens), start + self._max_step_tokens)
            if start < end:
                self.make_writable(sequence, start, end, now)
        elif sequence.state is State.WAITING:
            self.make_room(sequence, self._cache.write_cost(sequence.table, sequence.num_computed, sequence.total), now)

    def make_room(self, sequence: Sequence, cost: int, now: float) -> bool:
        """Whether a sequence may start: a slot, and pages for all it has, with one to spare for each that runs."""
        running = self._roster.running
        rank = self._roster.rank
        while True:
            enough = not running or self._cache.num_available >= cost + len(running)
            if self._roster.slots.num_free and enough:
                return True
            if not enough and self._resting_pages_suffice(cost) and self._take_from_resting(sequence, now):
                continue
            victim = max(running.values(), key=rank, default=None)
            if victim is None or victim.priority <= sequence.priority or rank(victim) < rank(sequence):
                return False
            if not self._preempt(victim, sequence, now):
                return False

    def make_writable(self, sequence: Sequence, start: int, end: int, now: float) -> bool:
        """Pages for tokens `start` to `end`, taken from others where none are free. False: not in this step."""
        rank = self._roster.rank
        while not self._cache.prepare_write(sequence.table, start, end, now):
            if self._cache.num_soon >= self._cache.write_cost(sequence.table, start, end):
                return False  # pages are on their way, held back by the steps in flight
            if self._take_from_resting(sequence, now):
                continue
            victim = max(self._roster.running.values(), key=rank)
            if victim is not sequence and rank(victim) > rank(sequence):
                if not self._preempt(victim, sequence, now):
                    return False
            elif not self._cache.retention.break_pins(now) and not self.last_resort(now):
                return False
        return True

    def make_free(self, count: int, now: float) -> bool:
        """Pages for somebody who is no sequence, from sequences at rest alone; one is left for each that runs."""
        wanted = count + len(self._roster.running)
        while self._cache.num_available < wanted:
            resting = sum(len(sequence.table.pages) for sequence in self._roster.resting.values())
            if self._cache.num_available + resting < wanted or not self._take_from_resting(None, now):
                return False
        return True

    def _resting_pages_suffice(self, cost: int) -> bool:
        """Whether taking pages from sequences at rest could be enough: else they keep theirs."""
        resting = sum(len(sequence.table.pages) for sequence in self._roster.resting.values())
        return self._cache.num_available + resting >= cost + len(self._roster.running)

    def _take_from_resting(self, needy: Sequence | None, now: float) -> bool:
        """Take the pages of one sequence without a slot: the longest idle, else the last in the queue."""
        resting = self._roster.resting.values()
        idle = next((s for s in resting if s.state is State.IDLE and s is not needy), None)
        victim = idle or max((s for s in resting if s is not needy), key=self._roster.rank, default=None)
        if victim is None:
            return False
        self._discard(victim, now)
        return True

    def _preempt(self, victim: Sequence, needy: Sequence, now: float) -> bool:
        """Stop a running sequence and take its pages; it is recomputed when its turn comes. False: not in this step."""
        if victim.last_step >= self._step_id:
            self._pressed = needy
            return False
        self._journal.counters.preemptions += 1
        head = victim.head
        if isinstance(head, Generate):
            head.num_preemptions += 1
        self._journal.trace(victim, "preempted", now, victim.num_computed)
        self._roster.stop_running(victim)
        self._discard(victim, now)
        self._roster.queue.push(victim)
        return True

    def _discard(self, sequence: Sequence, now: float) -> None:
        """Give back a sequence's pages; its tokens stay, to be computed again. Forks that follow it go on alone."""
        self._roster.free_followers(sequence, now)
        self._roster.queue.gave_up(sequence.seq)
        self._cache.free(sequence.table, sequence.tokens, _plain(sequence), now)
        sequence.num_computed = sequence.num_written = 0
        sequence.kv_epoch += 1
        head = sequence.head
        if isinstance(head, Append):
            head.hidden, head.hidden_done = None, 0
        self._roster.resting.pop(sequence.seq, None)


def _plain(sequence: Sequence) -> int:
    """Tokens whose KV may stay behind for others."""
    return min(sequence.num_written, len(sequence.tokens), sequence.num_plain)
