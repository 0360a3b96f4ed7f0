"""`Interception`: sequences that wait for something else than the device, and what becomes of their KV.

A sequence is *intercepted* while it has nothing to do: its program waits for a tool, a message, a person; or it is the
finished turn of a client that may send the next one. As long as pages are free it keeps its pages. When pages are
needed it is *parked*: the prefix index gets its pages, and a `Wait` marks their end. From then on its pages are as any
other pages of the index, given up from the end in the order of the policy, and found again when it has work.

Owns the waits of open sequences, and which waits of closed ones a new sequence continues. Called by the transitions of
the scheduler.
"""

from __future__ import annotations

from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.cache.radix import Match
from weft.sched.sequence import AppendOp, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable

QUEUE = "queue"
"""The kind of wait of a sequence that waits for the device alone."""


class Interception:
    """Parks sequences and follows their waits."""

    def __init__(self, cache: KVCache, sequences: SequenceTable):
        self._cache = cache
        self._sequences = sequences

    # Giving pages to the index

    def park(self, sequence: Sequence, now: float) -> None:
        """Give the pages of a sequence without a slot to the prefix index; what is not found there when it goes on is
        computed again. Forks that wait for it go on alone."""
        self._sequences.release_pending_forks(sequence, now)
        self._sequences.queue.gave_up(sequence.seq)
        self.unpark(sequence)
        is_idle = sequence.state is SequenceState.IDLE
        kind = sequence.wait_kind if is_idle else QUEUE
        wait = Wait(
            sequence.seq,
            sequence.tenant,
            kind,
            sequence.last_active_s,
            is_open=True,
            expected_s=sequence.expected_s if is_idle else None,
        )
        self._cache.free(
            sequence.table, sequence.tokens, plain_tokens(sequence), now, wait=wait, fence=sequence.last_step
        )
        sequence.wait = wait
        sequence.returning = False
        sequence.cut_kv(0)
        head = sequence.head
        if isinstance(head, AppendOp):
            head.hidden, head.hidden_done = None, 0
        self._sequences.without_slot.pop(sequence.seq, None)

    def park_idle(self, now: float) -> bool:
        """Park all sequences that have pages and nothing to do. Whether there was one."""
        idle = [s for s in self._sequences.without_slot.values() if s.state is SequenceState.IDLE]
        for sequence in idle:
            self.park(sequence, now)
        return bool(idle)

    def close(self, sequence: Sequence, kind: str, now: float) -> Wait:
        """The wait of a finished sequence that is about to be closed, for the one that will continue it."""
        self.unpark(sequence)
        return Wait(
            sequence.seq, sequence.tenant, kind, now, is_open=False, num_tokens=len(sequence.tokens)
        )

    # Returning

    def returned(self, sequence: Sequence, now: float) -> None:
        """A sequence that had nothing to do has work: until it gets its pages, it waits for the device alone."""
        wait = sequence.wait
        if wait is not None:
            wait.kind, wait.since_s, wait.expected_s = QUEUE, now, None
            if wait.end is not None:
                self._cache.tiers.offer(wait.end)
        sequence.expected_s = None

    def unpark(self, sequence: Sequence) -> None:
        """The sequence has found what is left of its pages, or needs none of them."""
        if sequence.wait is not None:
            self._cache.tiers.end_wait(sequence.wait)
            sequence.wait = None

    def continued(self, sequence: Sequence, match: Match, tokens: bytes) -> Wait | None:
        """The wait of a closed sequence of the same tenant that a new sequence continues, whose tokens have the prefix
        `match`: the one that it shares most tokens with. None: it continues none."""
        found: Wait | None = None
        for node in sequence.table.tree.ends(match, tokens):
            for wait in node.waits.values():
                if not wait.is_open and wait.tenant == sequence.tenant and wait.num_tokens < len(sequence.tokens):
                    if found is None or wait.num_tokens > found.num_tokens:
                        found = wait
        return found

    def end_continued(self, sequence: Sequence, match: Match, tokens: bytes) -> None:
        """End the waits that a new sequence continues: it supersedes them."""
        for node in list(sequence.table.tree.ends(match, tokens)):
            for wait in list(node.waits.values()):
                if not wait.is_open and wait.tenant == sequence.tenant and wait.num_tokens < len(sequence.tokens):
                    self._cache.tiers.end_wait(wait)


def plain_tokens(sequence: Sequence) -> int:
    """Tokens whose KV may stay behind for others."""
    return min(sequence.num_written, len(sequence.tokens), sequence.num_plain)
