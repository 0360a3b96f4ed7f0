"""`Reclaimer` makes room: it parks sequences in the order of `ByRank` until there is room, or the one in need has to
wait.

A parked sequence gives its pages to the prefix index, which gives up as many pages of all that are there as are needed.
A sequence that computes something in the step being built can give up nothing: then the one in need waits, and is
served before anything else of the next step is decided. Called by the step planner, and by spaces for explicit pages.

The *fair share* of a tenant is the device divided by the tenants that hold KV. What is kept for the shares of tenants
(`Ranking.kept`) is not taken as long as there is another choice. A tenant that holds more than its share waits: its new
sequences for those that it runs, and those that it runs for the first of them in rank. For other tenants, sequences of
tenants that use more than theirs are preempted. The only running sequence of a tenant gets what is kept where nothing
else is left. One that was preempted goes on after the one that it was preempted for, so every sequence comes to its
turn.

In overload, and at all times under policies that preserve, newcomers, and returns whose KV is gone, take no KV of their
tenant that the interception policy *spares*, as long as other sequences run. Otherwise all KV that waits is given up,
however soon it is needed, and the device computes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from weft.cache.manager import KVCache
from weft.sched.event_log import EventLog
from weft.sched.interception import Interception
from weft.sched.reclaim_policy import ByRank, Purpose, ReclaimView
from weft.sched.sequence import COLD, GenerateOp, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable

Room = Literal["enough", "none", "beyond_share", "spared"]
"""Whether there is room for a sequence; if not, there may be for sequences of other tenants: `beyond_share`, for those
that stay within their share; `spared`, for those that have KV."""


THRASHING = 0.1
"""Part of the recent time that goes into recomputation, from which on those without KV wait for spared KV. Below, a
device is full but keeps up, and making them wait would only delay them."""

GIVES_WAY_PLANS = 4
"""For so many plans one that was preempted waits at most for the one that it was preempted for: longer than steps that
are in flight hold its pages."""


class _Preempted(NamedTuple):
    """Why a sequence was preempted."""

    needy: Sequence
    num_computed: int
    """Tokens that `needy` had KV of."""
    until_plan: int


class Reclaimer:
    """Makes room for a sequence or a space, holder by holder."""

    def __init__(
        self,
        cache: KVCache,
        sequences: SequenceTable,
        interception: Interception,
        log: EventLog,
        max_step_tokens: int,
        aging_s: float,
    ):
        """`aging_s`: for how long one without KV waits at most, once it is the first, rather than take KV that the
        interception policy spares."""
        self._cache = cache
        self._sequences = sequences
        self._interception = interception
        self._log = log
        self._policy = ByRank()
        self._max_step_tokens = max_step_tokens
        self._aging_s = aging_s
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
        self._num_plans = 0
        self.preempted: dict[int, _Preempted] = {}
        """By number, sequences that were preempted a few plans ago."""

    def begin_step(self, step_id: int, now: float) -> None:
        """Make room for whom the last step left without, while nothing is in this step that could not be preempted."""
        self._step_id = step_id
        self._num_plans += 1
        if self.preempted:
            self.preempted = {seq: found for seq, found in self.preempted.items() if found.until_plan > self._num_plans}
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

    def gives_way(self, sequence: Sequence) -> bool:
        """Whether a sequence was preempted for one that has got nothing since. As it comes first of those that wait, it
        would take its pages back before the steps in flight let go of them, be preempted again without what it had
        computed meanwhile, and so on for ever."""
        found = self.preempted.get(sequence.seq)
        if found is None:
            return False
        needy = found.needy
        waits = needy.state in (SequenceState.WAITING, SequenceState.RUNNING)
        return waits and needy.num_computed <= found.num_computed

    def make_room(self, sequence: Sequence, cost: int, promised: int, now: float) -> Room:
        """Whether a waiting sequence may start: a slot, and `cost` pages for all it has, beside `promised` pages for
        those before it, what running ones lack, and one to spare for each of them. The first may always start
        where nothing runs: it makes room as it writes."""
        running, table, tiers = self._sequences.running, sequence.table, self._cache.tiers
        table.spares_kept = False
        while True:
            is_alone = not running and not promised
            num_free = tiers.device.num_free
            if is_alone and cost <= num_free:
                return "enough"
            needed = cost + promised + len(running) + sum(self._lacking.values())
            if needed <= num_free and self._sequences.slots.num_free:
                return "enough"
            missing = needed - self._cache.num_available
            if missing > 0 and self._interception.park_idle(now):
                continue
            spared = 0 if needed <= num_free or is_alone else self._missing_but_spared(sequence, needed, now)
            if spared > 0:
                if self._reclaim("admit", spared, sequence, now):
                    continue
                self.is_short = True
                return "spared"
            if needed > num_free and tiers.shares.is_shared:
                missing_kept = missing + tiers.num_kept_for_shares(now)
                table.spares_kept = missing_kept <= 0
                begun = self._unwritten(sequence.tenant)
                if missing_kept + begun > 0 and self._exceeds_with(sequence, cost + begun, missing + begun, now):
                    self.is_short = True
                    return "beyond_share"
                if missing <= 0 < missing_kept:
                    if self._reclaim("excess", missing_kept, sequence, now):
                        continue
                    if self._pressed is sequence:
                        self.is_short = True
                        return "none"
            if self._sequences.slots.num_free and missing <= 0:
                return "enough"
            if not self._reclaim("start" if is_alone else "admit", missing, sequence, now):
                self.is_short |= missing > 0 and not is_alone
                return "enough" if is_alone else "none"

    def make_writable(self, sequence: Sequence, start: int, end: int, now: float) -> bool:
        """Pages for tokens `start` to `end`, taken from others where none are free. False: not in this step."""
        cache, table, tiers = self._cache, sequence.table, self._cache.tiers
        may_spare = True
        while True:
            may_need_more = tiers.device.num_free < 2 + (end - start) // cache.page_size
            table.spares_kept = may_spare and may_need_more and tiers.shares.is_shared
            if cache.prepare_write(table, start, end, now):
                return True
            if self._interception.park_idle(now):
                continue
            cost = cache.write_cost(table, start, end)
            missing = cost - cache.num_soon + (tiers.num_kept_for_shares(now) if table.spares_kept else 0)
            is_beyond = table.spares_kept and self._exceeds_by(sequence.tenant, cost)
            purpose: Purpose = "own" if is_beyond else "excess" if table.spares_kept else "write"
            # Where nothing is missing, pages are on their way, held back by the steps in flight.
            if missing > 0 and self._reclaim(purpose, missing, sequence, now):
                continue
            if missing > 0 and purpose == "excess" and self._pressed is not sequence:
                may_spare = False
                continue
            if not is_beyond:
                self._lacking[sequence.seq] = cost
            self.is_short = True
            return False

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
        """Make `count` device pages free for explicit pages that come back from the host. Where nothing runs, pins give
        way too. Returns whether they are free."""
        while not self.make_free(count, now):
            missing = count - self._cache.num_available
            if self._sequences.running or not self._cache.retention.break_pin(missing, now):
                return False
        return True

    def _missing_but_spared(self, sequence: Sequence, needed: int, now: float) -> int:
        """How many of `needed` pages a newcomer, or a return whose KV is gone, lacks that does not take spared ones of
        its tenant; 0 or less: none, or it has waited for them for `aging_s`, by which a more urgent priority counts as
        having come earlier. Those of a tenant wait one after the other."""
        place, tiers = sequence.place, self._cache.tiers
        has_begun = place.num_known > 0 and place.line != COLD
        if has_begun or place.was_admitted or sequence.table.pages:
            return 0
        if not self._interception.policy.preserves and self._interception.recomputed.at(now) < THRASHING:
            return 0
        num_spared = tiers.candidates.num_spared(sequence.tenant, now)
        missing = needed + self._unwritten() - (tiers.num_available - num_spared)
        if not num_spared or missing <= 0:
            return 0
        place.held_since_s = min(place.held_since_s, now)
        bound_s = self._aging_s * (1 + min(sequence.priority, 0))
        return missing if now - place.held_since_s < bound_s else 0

    def _of_tenant(self, tenant: str) -> list[Sequence]:
        return [sequence for sequence in self._sequences.running.values() if sequence.tenant == tenant]

    def _exceeds_with(self, sequence: Sequence, cost: int, missing: int, now: float) -> bool:
        """Whether `cost` pages for a sequence would be beyond the share of its tenant, at the cost of other tenants'
        shares, and the tenant runs others."""
        tiers, tenant = self._cache.tiers, sequence.tenant
        if tiers.excess_in_use(tenant) + cost <= 0 or missing + tiers.num_kept_for_shares(now, but=tenant) <= 0:
            return False
        return bool(self._of_tenant(tenant))

    def _unwritten(self, tenant: str | None = None) -> int:
        """Pages that prompts of running sequences, of a tenant or of all, still need: admissions of the steps before
        count them."""
        if not self._sequences.num_prefilling:
            return 0
        running = self._sequences.running.values() if tenant is None else self._of_tenant(tenant)
        prompts = (s for s in running if not s.decoding)
        return sum(self._cache.write_cost(s.table, s.num_computed, s.total) for s in prompts)

    def _exceeds_by(self, tenant: str, cost: int) -> bool:
        """Whether a tenant runs several sequences, and uses more than its share with `cost` further pages."""
        tiers = self._cache.tiers
        if tenant not in tiers.shares.over or tiers.excess_in_use(tenant) + cost <= 0:
            return False
        return len(self._of_tenant(tenant)) > 1

    def _reclaim(self, purpose: Purpose, missing: int, needy: Sequence | None, now: float) -> bool:
        """Have a holder give up its pages, or several that wait, until no more are missing. False: the one in need has
        to wait."""
        holders = self._policy.choose(ReclaimView(purpose, missing, self._cache, self._sequences, needy))
        if not holders:
            return False
        holder, enough = holders[0], self._cache.num_available + missing
        match holder.kind:
            case "pin":
                return self._cache.retention.break_pin(missing, now)
            case "space":
                return self.last_resort(now)
            case "waiting":
                for holder in holders:
                    waiting = self._sequences.without_slot.get(holder.seq)
                    if waiting is not None:
                        self._interception.park(waiting, now)
                    if self._cache.num_available >= enough:
                        break
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
        if self._log.traces:
            self._log.trace(victim, "preempted", now, victim.num_computed)
        self._sequences.stop_running(victim)
        victim.last_active_s = now
        self._interception.park(victim, now)
        self._sequences.queue.push(victim)
        self.preempted[victim.seq] = _Preempted(needy, needy.num_computed, self._num_plans + GIVES_WAY_PLANS)
        return True
