"""`WaitingQueue`: sequences that have work and no slot, in one total order.

The order is `arrival + priority * aging_s`, then the sequence number: a priority is worth so many seconds of having
come earlier. Two waiting sequences never change places, and only finitely many requests can ever overtake one: those
that arrive less than `(priority difference) * aging_s` after it. So every wait is bounded, and nothing has to be
re-sorted as time passes.

Also where sequences wait for a prefix that another is computing: they are looked at again when that one has got
further or given up, or after a bounded number of steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from weft.sched.sequence import Sequence, State


class WaitingQueue:
    """See the module's docstring."""

    def __init__(self, aging_s: float):
        self._aging_s = aging_s
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._pushes = 0
        self._size = 0
        self._parked: dict[int, list[Sequence]] = {}
        self._parked_order: deque[tuple[int, Sequence]] = deque()
        self._num_parked = 0

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """The place in the order; smaller is earlier. Total and constant while the priority is."""
        return (sequence.arrival_s + sequence.priority * self._aging_s, sequence.seq)

    def __len__(self) -> int:
        """Waiting and parked sequences."""
        return self._size + self._num_parked

    def push(self, sequence: Sequence) -> None:
        """Enter the queue."""
        sequence.move_to(State.WAITING)
        rank = self.rank(sequence)
        if sequence.queued_rank == rank:
            return
        if sequence.queued_rank is None:
            self._size += 1
        sequence.queued_rank = rank
        self._pushes += 1
        heapq.heappush(self._heap, (rank, self._pushes, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Leave the queue, from wherever in it. Idempotent."""
        if sequence.queued_rank is not None:
            sequence.queued_rank = None
            self._size -= 1
        if sequence.parked_on >= 0:
            sequence.parked_on = -1
            self._num_parked -= 1

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in no order; parked ones are not among them."""
        for rank, _, sequence in self._heap:
            if sequence.queued_rank == rank:
                yield sequence

    def pop(self) -> Sequence | None:
        """Take the first waiting sequence out."""
        while self._heap:
            rank, _, sequence = heapq.heappop(self._heap)
            if sequence.queued_rank == rank:
                sequence.queued_rank = None
                self._size -= 1
                return sequence
        return None

    def park(self, sequence: Sequence, claimant: int, until_step: int) -> None:
        """Set a sequence that is out of the queue aside until `claimant` has got further, at most until a step."""
        sequence.move_to(State.PARKED)
        sequence.parked_on = claimant
        sequence.parked_until_step = until_step
        self._parked.setdefault(claimant, []).append(sequence)
        self._parked_order.append((until_step, sequence))
        self._num_parked += 1

    def unpark(self, claimant: int) -> None:
        """`claimant` has got further, or will not: look at those who wait for it again."""
        for sequence in self._parked.pop(claimant, ()):
            if sequence.parked_on == claimant:
                self._requeue(sequence)

    def unpark_due(self, step: int) -> None:
        """Nobody waits for a prefix beyond their step; these compute for themselves now."""
        while self._parked_order and self._parked_order[0][0] <= step:
            until, sequence = self._parked_order.popleft()
            if sequence.parked_on >= 0 and sequence.parked_until_step == until:
                sequence.no_parking = True
                self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.parked_on = -1
        self._num_parked -= 1
        self.push(sequence)
