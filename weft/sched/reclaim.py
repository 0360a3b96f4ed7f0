"""`Reclaimer` makes room: it parks sequences in the order of a `ReclaimPolicy` until there is room, or the one in need
has to wait.

A parked sequence gives its pages to the prefix index, which gives up as many pages of all that are there as are needed.
A sequence that computes something in the step being built can give up nothing: then the one in need waits, and is
served before anything else of the next step is decided. Called by the step planner, and by spaces for explicit pages.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.cache.manager import KVCache
from weft.sched.event_log import EventLog
from weft.sched.interception import Interception
from weft.sched.reclaim_policy import Purpose, ReclaimPolicy, ReclaimView
from weft.sched.sequence import GenerateOp, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable


class Reclaimer:
    """Makes room for a sequence or a space, holder by holder."""

    def __init__(
        self,
        cache: KVCache,
        sequences: SequenceTable,
        interception: Interception,
        log: EventLog,
        policy: ReclaimPolicy,
        max_step_tokens: int,
    ):
        self._cache = cache
        self._sequences = sequences
        self._interception = interception
        self._log = log
        self._policy = policy
        self._max_step_tokens = max_step_tokens
        self._step_pages = -(-max_step_tokens // cache.page_size)
        """Pages that a step's prompts may fill."""
        self._step_id = 0
        """The step being built."""
        self.last_resort: Callable[[float], bool] = lambda now: False
        """Called when nothing else is left to take: whether it has freed pages."""
        self.is_short = False
        """Whether pages were missing for the step being built, so that something has to wait for them."""
        self._pressed: Sequence | None = None
        """Had to wait for room that sequences of later rank in the same step were holding."""
        self._lacking: dict[int, int] = {}
        """Pages that sequences with a slot could not get in this step, by sequence: no newcomer gets them before."""

    def begin_step(self, step_id: int, now: float) -> None:
        """Make room for whom the last step left without, while nothing is in this step that could not be preempted."""
        self._step_id = step_id
        self._lacking.clear()
        self.is_short = False
        if self._cache.tiers.device.num_free < len(self._sequences.running) + self._step_pages:
            # This step may have to give pages up: then those of idle sequences are among the choice.
            self._interception.park_idle(now)
        sequence, self._pressed = self._pressed, None
        if sequence is None:
            return
        if sequence.state is SequenceState.RUNNING and not sequence.decoding:
            start = sequence.num_computed
            end = min(sequence.target, len(sequence.tokens), start + self._max_step_tokens)
            if start < end:
                self.make_writable(sequence, start, end, now)
        elif sequence.state is SequenceState.WAITING:
            cost = self._cache.write_cost(sequence.table, sequence.num_computed, sequence.total)
            self.make_room(sequence, cost, 0, now)

    def make_room(self, sequence: Sequence, cost: int, promised: int, now: float) -> bool:
        """Whether a waiting sequence may start: a slot, and `cost` pages for all it has, beside `promised` pages for
        those before it, what running ones lack, and one to spare for each of them. The first may always start
        where nothing runs: it makes room as it writes."""
        running = self._sequences.running
        while True:
            is_alone = not running and not promised
            if is_alone and cost <= self._cache.tiers.device.num_free:
                return True
            missing = cost + promised + len(running) + sum(self._lacking.values()) - self._cache.num_available
            if self._sequences.slots.num_free and missing <= 0:
                return True
            if missing > 0 and self._interception.park_idle(now):
                continue
            if not self._reclaim("start" if is_alone else "admit", missing, sequence, now):
                self.is_short |= missing > 0 and not is_alone
                return is_alone

    def make_writable(self, sequence: Sequence, start: int, end: int, now: float) -> bool:
        """Pages for tokens `start` to `end`, taken from others where none are free. False: not in this step."""
        while not self._cache.prepare_write(sequence.table, start, end, now):
            missing = self._cache.write_cost(sequence.table, start, end) - self._cache.num_soon
            # Where nothing is missing, pages are on their way, held back by the steps in flight.
            if not self._interception.park_idle(now) and (
                missing <= 0 or not self._reclaim("write", missing, sequence, now)
            ):
                self._lacking[sequence.seq] = self._cache.write_cost(sequence.table, start, end)
                self.is_short = True
                return False
        return True

    def make_free(self, count: int, now: float) -> bool:
        """Explicit pages of a program, from sequences without a slot alone; one is left for each that runs."""
        wanted = count + len(self._sequences.running)
        while self._cache.num_available < wanted:
            if self._interception.park_idle(now):
                continue
            if not self._reclaim("spaces", wanted - self._cache.num_available, None, now):
                self.is_short = True
                return False
        return True

    def make_back(self, count: int, now: float) -> bool:
        """As `make_free`, for explicit pages that come back from the host: where nothing runs, pins give way."""
        while not self.make_free(count, now):
            if self._sequences.running or not self._cache.retention.break_pin(now):
                return False
        return True

    def _reclaim(self, purpose: Purpose, missing: int, needy: Sequence | None, now: float) -> bool:
        """Have one holder give up its pages. False: the one in need has to wait."""
        holder = self._policy.choose(ReclaimView(purpose, missing, self._cache, self._sequences, needy))
        if holder is None:
            return False
        match holder.kind:
            case "pin":
                return self._cache.retention.break_pin(now)
            case "space":
                return self.last_resort(now)
            case "waiting":
                self._interception.park(self._sequences.without_slot[holder.seq], now)
                return True
            case "running":
                victim = next(s for s in self._sequences.running.values() if s.seq == holder.seq)
                assert needy is not None, "a policy preempts for sequences alone"
                return self._preempt(victim, needy, now)

    def _preempt(self, victim: Sequence, needy: Sequence, now: float) -> bool:
        """Stop a running sequence and take its pages. False: not in this step."""
        if victim.last_step >= self._step_id:
            self._pressed = needy
            return False
        self._log.counters.preemptions += 1
        head = victim.head
        if isinstance(head, GenerateOp):
            head.num_preemptions += 1
        self._log.trace(victim, "preempted", now, victim.num_computed)
        self._sequences.stop_running(victim)
        self._interception.park(victim, now)
        self._sequences.queue.push(victim)
        return True
