"""`ClosedWaits`: the waits of sequences that are closed, and which of them a new sequence continues.

A plain client opens a sequence for every turn, so what continues a turn is known by its tokens alone. A wait whose KV
is there is found where its pages end in the prefix index; one whose KV is gone, or whose answer is rendered
differently, by `FinishedTurns`. A sequence that continues a wait has the age of its session, and ends the wait. Owned
by `Interception`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.cache.radix import Match
from weft.core.ids import TOKEN_BYTES
from weft.core.waits import WaitKind
from weft.sched.config import SchedulerConfig
from weft.sched.finished_turns import FinishedTurns
from weft.sched.sequence import Sequence
from weft.sched.wait_log import PastWait, WaitLog

MOST = 0.5
"""Part of its tokens of which a return has KV, in either tier, that goes before those whose KV is gone."""
MIN_PRUNED = 256
"""Waits from which on those that have ended are dropped: whenever there are twice as many as the last time left."""


class ClosedWaits:
    """Waits of closed sequences, by number; some may have ended."""

    def __init__(self, cache: KVCache, config: SchedulerConfig, log: WaitLog):
        self._cache = cache
        self._config = config
        self._log = log
        self._turns = FinishedTurns()
        self._waits: dict[int, Wait] = {}
        self._prune_at = MIN_PRUNED

    def of_tenant(self, tenant: str) -> Iterator[Wait]:
        """Those of a tenant of whose KV something is left."""
        for wait in self._waits.values():
            if wait.end is not None and wait.tenant == tenant:
                yield wait

    def add(self, wait: Wait) -> None:
        """A sequence was closed. Those that have ended are dropped from time to time."""
        self._waits[wait.seq] = wait
        if len(self._waits) >= self._prune_at:
            self._waits = {seq: wait for seq, wait in self._waits.items() if wait.end is not None}
            self._prune_at = max(2 * len(self._waits), MIN_PRUNED)

    def add_turn(self, sequence: Sequence, wait: Wait) -> None:
        """The closed sequence was a turn, which a request may continue that finds nothing of its answer."""
        tokens = sequence.tokens.tobytes()
        numbers = self._cache.prefix_numbers(sequence.table, tokens[: sequence.num_prompt * TOKEN_BYTES])
        self._turns.add(wait, tokens, sequence.num_prompt, numbers, self._config.eos_token_ids)

    def first_found(self, sequence: Sequence, tokens: bytes, num_found: int, arrival_s: float) -> None:
        """Record the first KV that a new sequence got (`num_found` tokens): how many of the others had been computed
        before, how many belong to the turn that it continues, and where it diverges from that turn."""
        sequence.high_water = num_found
        given_up = self._cache.tiers.given_up
        if not given_up and not self._turns:
            return
        numbers = self._cache.prefix_numbers(sequence.table, tokens)
        if given_up:
            sequence.high_water = given_up.extent(sequence.table.tree.root.owner, numbers, num_found)
        turn = self._turns.find(tokens, numbers)
        if turn is not None:
            first = turn.first_different
            # KV behind that token is of a sequence that is not known as a turn, such as one that still runs.
            sequence.first_different = first if first is not None and first >= num_found else None
            sequence.sources.continued = max(sequence.sources.continued, turn.num_tokens)
            if not turn.wait.has_ended and turn.wait.tenant == sequence.tenant:
                self._end(turn.wait, sequence, arrival_s)
                self._cache.retention.supersede(turn.wait, arrival_s)

    def inherit(self, sequence: Sequence, now: float) -> None:
        """Give a new sequence the age of the one that it continues, if it does, whose KV now waits for the device
        alone."""
        tokens = sequence.index_keys.tobytes()
        match = self._cache.lookup(sequence.table, tokens, len(sequence.tokens))
        waits = self._continued(sequence, match, tokens)
        last = waits[-1] if waits else self._wait_without_kv(sequence, tokens)
        if last is not None:
            self.let_go(sequence)  # of what its tokens continued before more were appended
            sequence.continues = last
            self._count_return(last, 1)
            place = sequence.place
            place.first_s, place.active_s, place.num_known = last.first_s, last.active_s, last.num_tokens
            has_kv = match.num_pages * self._cache.page_size >= MOST * last.num_tokens
            waited_s = now - last.since_s
            place.arrive(now, waited_s, self._config.return_order, self._config.aging_s, has_kv=has_kv)

    def let_go(self, sequence: Sequence) -> None:
        """A sequence does not wait for the device any more with the KV of the one that it continues. Idempotent."""
        wait, sequence.continues = sequence.continues, None
        if wait is not None:
            self._count_return(wait, -1)

    def _count_return(self, wait: Wait, change: int) -> None:
        wait.num_returns += change
        if wait.end is not None:
            self._cache.tiers.wait_changed(wait.end)

    def end_continued(self, sequence: Sequence, match: Match, tokens: bytes, arrival_s: float) -> None:
        """End the waits that a new sequence, which arrived at `arrival_s`, continues: it supersedes them."""
        waits = self._continued(sequence, match, tokens)
        for wait in waits:
            self._cache.retention.supersede(wait, arrival_s)
        if waits:
            sequence.sources.continued = max(sequence.sources.continued, waits[-1].num_kv)
            self._end(waits[-1], sequence, arrival_s)

    def _end(self, wait: Wait, sequence: Sequence, arrival_s: float) -> None:
        """The wait of a closed sequence ends with a sequence that has arrived at `arrival_s`."""
        wait.has_ended = True
        sequence.returned_kind = wait.kind
        announced_s = math.nan if wait.expected_s is None else wait.expected_s - wait.since_s
        waited_s = max(0.0, arrival_s - wait.since_s)
        kind = wait.cohort or wait.kind
        self._log.past.append(PastWait(wait.tenant, kind, waited_s, announced_s, since_s=wait.since_s))

    def _wait_without_kv(self, sequence: Sequence, tokens: bytes) -> Wait | None:
        """The wait of the turn that a new sequence with these tokens is the first to continue, though it finds nothing
        of the turn's answer: its KV is gone, or the answer is rendered differently."""
        if not self._turns:
            return None
        turn = self._turns.find(tokens, self._cache.prefix_numbers(sequence.table, tokens))
        if turn is None or turn.wait.has_ended or turn.wait.tenant != sequence.tenant:
            return None
        return turn.wait

    def _is_whole(self, wait: Wait) -> bool:
        """Whether all KV of a wait is there. What is left of one that was cut may be a prefix that others share, so the
        tokens tell what continues it (`FinishedTurns`)."""
        num_pages = 0 if wait.end is None else wait.end.depth_pages
        return not wait.was_cut and num_pages >= wait.num_kv // self._cache.page_size

    def _continued(self, sequence: Sequence, match: Match, tokens: bytes) -> list[Wait]:
        """The waits of closed sequences of the same tenant that a new sequence continues, whose tokens have the prefix
        `match`. The one that it shares most tokens with is the last."""
        if not self._waits:
            return []
        found = [
            wait
            for node in sequence.table.tree.ends(match, tokens)
            for wait in node.waits.values()
            if not wait.is_open and wait.tenant == sequence.tenant and wait.num_tokens < len(sequence.tokens)
            if wait.kind == WaitKind.HOLD or self._is_whole(wait)
        ]
        found.sort(key=lambda wait: (wait.num_tokens, wait.since_s))
        return found
