"""`SequenceTable`: every open sequence and where it is: with a slot, in the queue, or idle with its pages.

Owns the slots, the queue, and the moves from one place to another. Does not know what a step computes (`planner.py`)
nor which sequence has to make room (`reclaim_policy.py`). The transitions of the scheduler call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.abi.errors import UnknownHandle
from weft.cache.manager import KVCache
from weft.core.step import I32
from weft.sched.order import FairOrder
from weft.sched.queue import WaitingQueue
from weft.sched.sequence import GenerateOp, Rank, Sequence, SequenceState
from weft.sched.slots import DecodeTable

LEAST_BRANCH = -(1 << 31)
"""The least number of a branch; keys are of 32 bits. Then numbers begin anew."""


class Decoding(NamedTuple):
    """The sequences that compute one token in every step, in order of rank, and their slots."""

    slots: I32
    sequences: list[Sequence]


class SequenceTable:
    """Sequences by handle, by slot, and those that keep pages without a slot."""

    def __init__(self, cache: KVCache, order: FairOrder, *, max_running: int, max_context: int):
        self.open: dict[tuple[int, int], Sequence] = {}
        """By (client, handle)."""
        self.queue = WaitingQueue(order)
        self.slots = DecodeTable(max_running, -(-max_context // cache.page_size) + 1)
        self.running: dict[int, Sequence] = {}
        """By slot."""
        self.without_slot: dict[int, Sequence] = {}
        """Sequences with pages and without a slot, by number, least recently active first."""
        self._cache = cache
        self.num_decoding = 0
        """Running sequences that compute one token in every step."""
        self._decoding: Decoding | None = None
        """None: has changed since it was last made."""
        self._last_branch = 0
        self._branches_before: set[int] = set()
        """Numbers in use since before they began anew."""

    def __len__(self) -> int:
        """Open sequences of all clients."""
        return len(self.open)

    def __iter__(self) -> Iterator[Sequence]:
        """All open sequences."""
        yield from self.open.values()

    def find(self, client: int, handle: int) -> Sequence:
        """A client's sequence. Raises `UnknownHandle` for one that is not open."""
        sequence = self.open.get((client, handle))
        if sequence is None:
            raise UnknownHandle(f"sequence {handle} is not open: it was never opened, was released, or its lease ended")
        return sequence

    def tenant_of(self, client: int, handle: int) -> str:
        """The tenant of a client's sequence; empty for one that is not open."""
        sequence = self.open.get((client, handle))
        return "" if sequence is None else sequence.tenant

    def rank(self, sequence: Sequence) -> Rank:
        """The place in the total order by which steps are filled and pages reclaimed; smaller is earlier."""
        return self.queue.order.rank(sequence)

    def new_branch(self) -> int:
        """A number for a branch (`weft.sched.masks`) that no open sequence has."""
        while True:
            if self._last_branch == LEAST_BRANCH:
                self._last_branch = 0
                self._branches_before = {branch.number for sequence in self for branch in sequence.branches}
            self._last_branch -= 1
            if self._last_branch not in self._branches_before:
                return self._last_branch

    @property
    def num_prefilling(self) -> int:
        """Running sequences that compute known tokens."""
        return len(self.running) - self.num_decoding

    @property
    def decodes_changed(self) -> bool:
        """Whether a sequence has begun or stopped to decode since `decoding` was last called."""
        return self._decoding is None

    def decoding(self) -> Decoding:
        """The sequences that decode now."""
        if self._decoding is None:
            sequences = [s for s in self.running.values() if s.decoding]
            sequences.sort(key=self.rank)
            self._decoding = Decoding(np.array([s.slot for s in sequences], np.int32), sequences)
        return self._decoding

    def run(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Give a sequence a slot. It has `num_tokens` tokens to compute. The caller has seen that a slot is free."""
        self.queue.order.admitted(sequence, num_tokens, now)
        sequence.slot = self.slots.take()
        self.running[sequence.slot] = sequence
        self.without_slot.pop(sequence.seq, None)
        sequence.move_to(SequenceState.RUNNING)
        sequence.place.defer_until_step = -1
        sequence.last_active_s = now
        head = sequence.head
        if isinstance(head, GenerateOp) and head.first_launch_s is None:
            head.first_launch_s = now

    def set_service(self, sequence: Sequence, service: int) -> None:
        """Change the place of a sequence's service in the order, wherever the sequence is."""
        sequence.service = service
        self._decoding = None
        if sequence.state in (SequenceState.WAITING, SequenceState.DEFERRED):
            self.queue.push(sequence)

    def begin_decoding(self, sequence: Sequence) -> None:
        """From the next step on a running sequence computes one token at a time."""
        sequence.decoding = True
        self.num_decoding += 1
        self._decoding = None

    def stop_running(self, sequence: Sequence) -> None:
        """Take a running sequence's slot away. KV that steps in flight write stays valid; their tokens do too, unless
        the caller moves the sequence's `epoch` on."""
        if sequence.slot >= 0:
            del self.running[sequence.slot]
            self.slots.give_back(sequence.slot)
            sequence.slot = -1
            if sequence.decoding:
                sequence.decoding = False
                self.num_decoding -= 1
                self._decoding = None
        if sequence.table.announced:
            self._cache.withdraw(sequence.table)
        self.queue.gave_up(sequence.seq)

    def enqueue_or_idle(self, sequence: Sequence, now: float) -> None:
        """Put a sequence without a slot where it belongs. Without an operation, only tokens that never had KV are work:
        what was given up is computed again for the next operation, if there is one."""
        sequence.last_active_s = now
        if sequence.table.pages:
            self.without_slot.pop(sequence.seq, None)
            self.without_slot[sequence.seq] = sequence
        if sequence.has_work and (sequence.ops or sequence.high_water < sequence.total - 1):
            self.queue.push(sequence)
        elif sequence.state is not SequenceState.IDLE:
            self.queue.remove(sequence)
            sequence.move_to(SequenceState.IDLE)
            if sequence.pending_forks:
                self.release_pending_forks(sequence, now)

    def release_pending_forks(self, parent: Sequence, now: float) -> None:
        """`parent` will not compute what its pending forks wait for."""
        for child in parent.pending_forks:
            child.parent = None
            self.enqueue_or_idle(child, now)
        parent.pending_forks = []

    def trim(self, sequence: Sequence, now: float) -> None:
        """Drop the KV that a sequence without a slot has beyond its known tokens."""
        if sequence.num_computed <= len(sequence.tokens):
            self._cut(sequence, sequence.num_computed, now)
        else:
            self.rewind(sequence, now)

    def rewind(self, sequence: Sequence, now: float) -> None:
        """Leave the last token of a sequence without KV: an operation needs what only computing it gives."""
        self._cut(sequence, max(0, min(sequence.num_computed, len(sequence.tokens) - 1)), now)

    def cut_to_index(self, sequence: Sequence, now: float) -> None:
        """Drop the KV that a sequence without a slot has beyond its pages in the prefix index, less than a page, before
        it gets that of other sequences. All that it has is written."""
        keep = sequence.table.num_indexed * self._cache.page_size
        sequence.cut_kv(keep)
        self._cache.truncate(sequence.table, keep, now)

    def _cut(self, sequence: Sequence, keep: int, now: float) -> None:
        if not sequence.table.pages:
            return
        if keep >= sequence.num_computed and sequence.table.announced and sequence.state is SequenceState.RUNNING:
            return  # there is nothing beyond, and others may wait for the prefix that it computes
        if keep < sequence.num_computed:
            sequence.returning = sequence.has_partial = False  # it goes on with what is left on the device
            sequence.cut_kv(keep)
            sequence.high_water = keep  # cut by its own operations, not given up to make room
        self._cache.truncate(sequence.table, keep, now)

    def close(self, sequence: Sequence) -> None:
        """A sequence without a slot is given up."""
        self.queue.remove(sequence)
        self.without_slot.pop(sequence.seq, None)
        sequence.move_to(SequenceState.CLOSED)
