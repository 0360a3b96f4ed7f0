"""`Roster`: where every sequence is: in a slot, in the queue, or at rest with its pages.

Owns the slots, the queue, and the moves from one place to another. Does not know what a step computes
(`scheduler.py`) nor who has to make room (`reclaim.py`); those, `operations.py` and `intake.py` call it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.cache.manager import KVCache
from weft.core.step import I32
from weft.sched.order import FairOrder, Rank
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import Generate, Sequence, State
from weft.sched.slots import SlotTable


class Decoding(NamedTuple):
    """The sequences that compute one token in every step, in order of rank, and their slots."""

    slots: I32
    sequences: list[Sequence]


class Roster:
    """See the module's docstring."""

    def __init__(self, cache: KVCache, *, max_running: int, max_context: int, aging_s: float):
        self.queue = WaitingQueue(FairOrder(aging_s))
        self.slots = SlotTable(max_running, -(-max_context // cache.page_size) + 1)
        self.running: dict[int, Sequence] = {}
        """By slot."""
        self.resting: dict[int, Sequence] = {}
        """Sequences with pages and without a slot, by number, least recently active first."""
        self._cache = cache
        self._decoding: Decoding | None = None
        """None: has changed since it was last made."""

    def rank(self, sequence: Sequence) -> Rank:
        """The place in the total order by which steps are filled and pages reclaimed; smaller is earlier."""
        return self.queue.order.rank(sequence)

    @property
    def decodes_changed(self) -> bool:
        """Whether a sequence has begun or stopped to decode since `decoding` was last called."""
        return self._decoding is None

    def decoding(self) -> Decoding:
        """Who decodes."""
        if self._decoding is None:
            sequences = [s for s in self.running.values() if s.decoding]
            sequences.sort(key=self.rank)
            self._decoding = Decoding(np.array([s.slot for s in sequences], np.int32), sequences)
        return self._decoding

    def run(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Give a sequence a slot. It has `num_tokens` tokens to compute. The caller has seen that a slot is free."""
        self.queue.order.admitted(sequence, num_tokens)
        sequence.slot = self.slots.take()
        self.running[sequence.slot] = sequence
        self.resting.pop(sequence.seq, None)
        sequence.move_to(State.RUNNING)
        sequence.place.defer_until_step = -1
        sequence.last_active_s = now
        head = sequence.head
        if isinstance(head, Generate) and head.first_launch_s is None:
            head.first_launch_s = now

    def begin_decoding(self, sequence: Sequence) -> None:
        """From the next step on a running sequence computes one token at a time."""
        sequence.decoding = True
        self._decoding = None

    def stop_running(self, sequence: Sequence) -> None:
        """Take a running sequence's slot away. Results in flight stay valid."""
        if sequence.slot >= 0:
            del self.running[sequence.slot]
            self.slots.give_back(sequence.slot)
            sequence.slot = -1
            sequence.decoding = False
            self._decoding = None
        self._cache.withdraw(sequence.table)
        self.queue.gave_up(sequence.seq)

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

    def free_followers(self, parent: Sequence, now: float) -> None:
        """`parent` will not compute what its forks wait for."""
        for child in parent.followers:
            child.parent = None
            self.enqueue_or_rest(child, now)
        parent.followers = []

    def trim(self, sequence: Sequence, now: float) -> None:
        """Drop what a sequence at rest has beyond its known tokens."""
        if sequence.num_computed <= len(sequence.tokens):
            self._cut(sequence, sequence.num_computed, now)
        else:
            self.rewind(sequence, now)

    def rewind(self, sequence: Sequence, now: float) -> None:
        """Leave the last token of a sequence without KV: somebody needs what only computing it gives."""
        self._cut(sequence, max(0, min(sequence.num_computed, len(sequence.tokens) - 1)), now)

    def _cut(self, sequence: Sequence, keep: int, now: float) -> None:
        if keep < sequence.num_computed:
            sequence.kv_epoch += 1
        sequence.num_computed = keep
        sequence.num_written = min(sequence.num_written, keep)
        self._cache.truncate(sequence.table, keep, now)

    def close(self, sequence: Sequence) -> None:
        """A sequence without a slot is given up."""
        self.queue.remove(sequence)
        self.resting.pop(sequence.seq, None)
        sequence.move_to(State.CLOSED)
