"""`Interception`: sequences that wait for something other than the device, and what becomes of their KV.

A sequence is *intercepted* while it has nothing to do: its program waits for a tool, a message, a person; or it is the
finished turn of a client that may send the next one. As long as pages are free it keeps its pages. When pages are
needed it is *parked*: the prefix index gets its pages, and a `Wait` marks their end. From then on its pages are as any
other pages of the index, given up from the end in the order of the policy, and found again when it has work.

Owns the waits of open sequences, those of closed ones (`ClosedWaits`), and the budget of pages that a step may move
between device and host. Called by the transitions of the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from weft.cache.manager import KVCache
from weft.cache.nodes import Node, Wait
from weft.cache.page_table import pages_of_tables
from weft.cache.retention import RetainedRun, prefix_wait
from weft.cache.runs import PageRuns, Ranking
from weft.cache.tiers import UNLIMITED
from weft.core.cost.model import HIDDEN_SHARE, CostModel, MoveBudget, StepShape
from weft.core.waits import COHORT_TOKENS, WaitKind, check_wait, label_of, of_cohort
from weft.core.wire import Expect, Release
from weft.sched.closed_waits import MOST, ClosedWaits
from weft.sched.config import SchedulerConfig
from weft.sched.policies.runs import START, InterceptPolicy, Load
from weft.sched.recompute_share import RecomputeShare
from weft.sched.sequence import AppendOp, Sequence, SequenceState
from weft.sched.sequence_table import SequenceTable
from weft.sched.wait_log import Found, PastWait, WaitLog

UNMEASURED_COPIES = 64
"""Pages that a step may move where no profile says what moving costs."""
IDLE_COPIES = 1024
"""Pages that a step may move which computes nothing."""
HORIZON_STEPS = 8
"""Copies are made ahead of runs that would be given up within so many steps full of prompts."""
MAX_CONSIDERED = 64
"""Runs that are considered for a copy in one step."""


class ExplicitPages(Protocol):
    """The explicit pages of programs that wait: `weft.sched.spaces.waits`."""

    def begin_step(self, now: float) -> None:
        """Act at the moment of interception."""

    def lend(self, now: float) -> bool:
        """Give pages to the tiers. Whether there were any."""
        ...

    def held(self) -> Mapping[str, int]:
        """Pages by tenant that were not given."""
        ...


class Interception:
    """Parks sequences, follows their waits, and asks the policy."""

    def __init__(
        self,
        cache: KVCache,
        sequences: SequenceTable,
        config: SchedulerConfig,
        policy: InterceptPolicy,
        costs: CostModel | None,
    ):
        self._costs = costs
        self._cache = cache
        self._sequences = sequences
        self._config = config
        self.policy = policy
        self._rests = 0
        """Steps until copies are looked for again, where no candidate changes: none was worth making."""
        self._seen_changes = 0
        """Of the candidates, when they were last looked at."""
        self._budget = MoveBudget(0, 1)
        """Pages that the step being built may move in all; steps per one that makes copies ahead."""
        self._since = 0
        """Steps since pages moved."""
        self._load: Load | None = None
        """Of the step being built; None: not asked for yet."""
        self.recomputed = RecomputeShare(costs)
        self.waits = WaitLog()
        self.closed = ClosedWaits(cache, config, self.waits)
        self.explicit: ExplicitPages | None = None
        """Those of programs that wait; None: no program has any."""
        cache.tiers.rank_by(self._rank, self._private_pages, self._note_unused)

    # Steps

    def begin_step(self, now: float) -> None:
        """A step is being built."""
        self._load = None
        tiers = self._cache.tiers
        self._since = 1 if tiers.copy_budget < self._budget.pages else self._since + 1
        self._budget = self._move_budget()
        tiers.begin_step(self._budget.pages)
        if self.policy.acts_at_start:
            idle = [s for s in self._sequences.without_slot.values() if s.state is SequenceState.IDLE]
            for sequence in idle:
                self._start(sequence, now)
            if self.explicit is not None:
                self.explicit.begin_step(now)

    def end_step(self, now: float) -> None:
        """The step being built has all its work: use what is left of its budget for copies made ahead."""
        tiers = self._cache.tiers
        self._rests -= 1
        if self._rests > 0 and tiers.candidates.num_changes == self._seen_changes:
            return
        horizon = HORIZON_STEPS * self._config.max_step_tokens // self._cache.page_size
        if tiers.host.num_pages == 0 or tiers.copy_budget <= 0 or tiers.device.num_free >= horizon:
            return
        if self.policy.acts_at_start:
            return  # what is to be on the host has been moved there
        if tiers.copy_budget == self._budget.pages and self._since < self._budget.steps:
            return  # a transfer takes more time than one step may be longer
        budget = tiers.copy_budget
        for node in tiers.candidates.worth_copies(MAX_CONSIDERED, now):
            if tiers.copy_budget <= 0 or not self._cache.copy_out(node):
                break
        if tiers.copy_budget == budget:
            self._rests, self._seen_changes = HORIZON_STEPS, tiers.candidates.num_changes

    def tokens_on_device(self) -> int:
        """KV tokens on the device of sequences that wait for something other than the device. Pages that several of
        them share count once; pages that a running or queued sequence uses too do not count."""
        tiers, without_slot = self._cache.tiers, self._sequences.without_slot.values()
        pages = tiers.num_awaited
        idle = [s.table for s in without_slot if s.state is SequenceState.IDLE and s.table.pages]
        if idle:
            others = [s.table for s in self._sequences.running.values()]
            others += [s.table for s in without_slot if s.state is not SequenceState.IDLE]
            pages += pages_of_tables(idle, others, tiers.node_of)
        return pages * self._cache.page_size

    def _move_budget(self) -> MoveBudget:
        """Pages that have to move do so in every step; the number of steps holds for copies made ahead."""
        if self.policy.at_start("") == "swap":
            return MoveBudget(UNLIMITED, 1)
        if not self._cache.tiers.host.num_pages:
            return MoveBudget(0, 1)
        if not self._sequences.running:
            return MoveBudget(IDLE_COPIES, 1)
        found = None if self._costs is None else self._costs.move_budget(self._running_shape(), HIDDEN_SHARE)
        return MoveBudget(UNMEASURED_COPIES, 1) if found is None else found

    def _private_pages(self) -> dict[str, int]:
        pages: dict[str, int] = {} if self.explicit is None else dict(self.explicit.held())
        for sequences in (self._sequences.running, self._sequences.without_slot):
            for sequence in sequences.values():
                table, tenant = sequence.table, sequence.tenant
                pages[tenant] = pages.get(tenant, 0) + len(table.pages) - table.num_indexed
        return pages

    def _note_unused(self, tenant: str, kind: str, seconds: float, was_used: bool, since_s: float = math.nan) -> None:
        self.waits.past.append(PastWait(tenant, kind, seconds, math.nan, was_used, since_s))

    def _rank(self, runs: PageRuns, now: float) -> Ranking:
        self.waits.tell(self.policy)
        load = self._load_at(now)
        policy = self.policy
        kept, spared = policy.kept(runs, load), policy.spares(runs, load)
        values = policy.rank(runs, load)
        forgotten = policy.rank(runs, load, may_move=False) if load.host_pages else values
        return Ranking(values, policy.moves(runs, load), kept, spared, forgotten)

    def _load_at(self, now: float) -> Load:
        if self._load is None:
            shape = self._running_shape()
            self._load = Load(
                now=now,
                running_tokens=shape.decode_kv,
                running_rows=shape.num_rows,
                saturation_tokens=self._config.saturation_tokens,
                page_size=self._cache.page_size,
                host_pages=self._cache.tiers.host.num_pages,
                costs=self._costs,
                swap_hidden=self._swap_hidden(shape),
                queued_s=dict(self.waits.queued_s),
            )
        return self._load

    def _running_shape(self) -> StepShape:
        """A step in which every running sequence decodes."""
        running = self._sequences.running
        return StepShape.decodes(len(running), sum(sequence.num_computed for sequence in running.values()))

    def _swap_hidden(self, shape: StepShape) -> float:
        """Part of the time of a transfer, of as many pages as a step of `shape` may move, in which its forward goes
        on."""
        tiers, costs = self._cache.tiers, self._costs
        if not tiers.host.num_pages or costs is None or self._budget.pages in (0, UNLIMITED):
            return 0.0
        link_s = costs.predict_swap_s(self._budget.pages)
        step_s = costs.predict_step_s(shape, self._budget.pages)
        if not link_s or step_s is None:
            return 0.0
        return min(max(1.0 - (step_s - costs.predict_forward_s(shape)) / link_s, 0.0), 1.0)

    def _start(self, sequence: Sequence, now: float) -> None:
        """Act at the moment of interception, as the policies do that are not lazy."""
        action = self.policy.at_start(sequence.wait_kind)
        if action == "discard" and (sequence.retained is None or sequence.retained.ended):
            self._discard(sequence, sequence.wait_kind, now, sequence.last_step)
            sequence.cut_kv(0)
            self._sequences.without_slot.pop(sequence.seq, None)
        elif action in ("swap", "swap_in_budget"):
            self.park(sequence, now)
            if sequence.wait is not None:
                self._move_out(sequence.wait, action, now)

    def _move_out(self, wait: Wait, action: START, now: float) -> None:
        """Move the KV that a wait has just begun for to the host, whole or as far as the step's budget goes. Then the
        rest is discarded: first pages are kept, since a later one is of no use without them."""
        end = wait.end
        if end is None:
            return
        if action == "swap_in_budget":
            whole = end.depth_pages
            end = self._cache.forget_after(end, self._movable(end), wait)
            self._cache.tiers.uses.moved_pages[label_of(wait.kind), "nowhere"] += whole - end.depth_pages
        self._cache.move_out(end, now)

    def _movable(self, end: Node) -> int:
        """How many of the pages up to `end`, from the first, have a copy on the host or get one within the budget."""
        path = [end]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        num_pages, budget = 0, max(0, self._cache.tiers.copy_budget)
        for node in reversed(path):
            taken = node.num_pages if node.copies else min(node.num_pages, budget)
            num_pages += taken
            if taken < node.num_pages:
                break
            budget -= 0 if node.copies else taken
        return num_pages

    # Giving pages to the index

    def park(self, sequence: Sequence, now: float) -> None:
        """Give the pages of a sequence without a slot to the prefix index; what is not found there when it goes on is
        computed again. Forks that wait for it go on alone."""
        self._sequences.release_pending_forks(sequence, now)
        self._sequences.queue.gave_up(sequence.seq)
        end = sequence.wait.end if sequence.wait is not None and sequence.returning else None
        self.unpark(sequence, now)
        is_idle = sequence.state is SequenceState.IDLE
        kind = sequence.wait_kind if is_idle else WaitKind.QUEUE
        wait = Wait(
            sequence.seq,
            sequence.tenant,
            kind,
            sequence.last_active_s,
            is_open=True,
            expected_s=sequence.expected_s if is_idle else None,
        )
        self._cache.free(
            sequence.table, sequence.index_keys, _num_written(sequence), now, wait=wait, fence=sequence.last_step
        )
        sequence.wait = wait
        if end is not None:
            self._mark(wait, end)  # the rest of what it had is still on the host
        if sequence.retained is not None:
            self._cache.retention.attach(sequence.retained, wait)
        sequence.returning = sequence.has_partial = False
        sequence.cut_kv(0)
        head = sequence.head
        if isinstance(head, AppendOp):
            head.hidden, head.hidden_done = None, 0
        self._sequences.without_slot.pop(sequence.seq, None)

    def park_idle(self, now: float) -> bool:
        """Park all sequences that have pages and nothing to do, and have programs that wait lend their explicit pages.
        Whether there was one.

        All of them, however few pages are missing: then the order covers every sequence that does not run.
        """
        idle = [s for s in self._sequences.without_slot.values() if s.state is SequenceState.IDLE]
        for sequence in idle:
            self.park(sequence, now)
        has_lent = self.explicit is not None and self.explicit.lend(now)
        return bool(idle) or has_lent

    def expect(self, sequence: Sequence, command: Expect, now: float) -> None:
        """Note what a sequence waits for, or will wait for once it has done its work. Raises `InvalidRequest`."""
        check_wait(command.kind, command.expected_in_s)
        sequence.wait_kind = command.kind
        sequence.expected_s = None if command.expected_in_s is None else now + command.expected_in_s
        wait = sequence.wait
        if wait is not None and sequence.state is SequenceState.IDLE:
            wait.kind, wait.expected_s = sequence.wait_kind, sequence.expected_s
            if wait.end is not None:
                self._cache.tiers.wait_changed(wait.end)

    def close(self, sequence: Sequence, how: Release, hold: RetainedRun | None, now: float) -> None:
        """Give up the pages of a sequence that is being closed. With a kind, another sequence may continue it: then
        its last page stays findable too. `hold` keeps them until another sequence continues it, what the sequence
        retained until that ends. From the page with the first mask on, nothing is found again."""
        kind = how.kind
        end = None if sequence.wait is None else sequence.wait.end
        self.unpark(sequence, now)
        table, tokens, num_written = sequence.table, sequence.tokens, _num_written(sequence)
        if sequence.branches:
            num_pages = sequence.num_plain // self._cache.page_size
            last = end or table.node
            self._cache.truncate(table, num_pages * self._cache.page_size, now)
            last = self._cache.forget_after(last, num_pages)
            end = None if end is None else last
            num_written = min(num_written, num_pages * self._cache.page_size)
        retained = None if sequence.retained is None or sequence.retained.ended else sequence.retained
        action = self.policy.at_start(kind) if kind and hold is None else "keep"
        cohort = of_cohort(kind, tokens[:COHORT_TOKENS].tobytes()) if kind else ""
        wait = Wait(
            sequence.seq,
            sequence.tenant,
            kind,
            now,
            is_open=False,
            num_tokens=len(tokens),
            num_kv=min(max(sequence.high_water, sequence.num_computed), len(tokens)),
            request_id=sequence.request_id,
            first_s=sequence.place.first_s,
            active_s=sequence.place.active_s,
            cohort=cohort,
            group=self.waits.group(self.policy, sequence.tenant, cohort) if cohort else "",
            expected_s=None if how.expected_in_s is None else now + how.expected_in_s,
            weight=0.0 if hold is None else hold.weight,  # without it, a node with many waits keeps none for the hold
        )
        if action == "discard" and retained is None:
            self._discard(sequence, kind, now, None)
        elif not kind and retained is None:
            self._cache.free(table, tokens, num_written, now)
        else:
            self._cache.free(table, tokens, num_written, now, wait=wait)
            if end is not None:
                self._mark(wait, end)  # it was parked, and its table empty
            if hold is not None:
                self._cache.retention.attach(hold, wait)
            if retained is not None:
                mark = prefix_wait(-retained.number, sequence.tenant, now)
                if wait.end is not None:
                    mark.attach(wait.end)
                self._cache.retention.attach(retained, mark)
            if not kind:
                self._cache.tiers.end_wait(wait)
            if action in ("swap", "swap_in_budget"):
                self._move_out(wait, action, now)
            self.closed.add(wait)
        if kind and hold is None and 0 < sequence.num_prompt <= len(tokens) and self._config.prefix_cache:
            self.closed.add_turn(sequence, wait)

    def _discard(self, sequence: Sequence, kind: str, now: float, fence: int | None) -> None:
        num_pages = self._cache.discard(sequence.table, now, fence)
        self._cache.tiers.uses.moved_pages[label_of(kind), "nowhere"] += num_pages

    def _mark(self, wait: Wait, end: Node) -> None:
        wait.attach(end)
        self._cache.tiers.wait_changed(end)

    # Returning

    def has_most(self, sequence: Sequence, wait: Wait) -> bool:
        """Whether most of the KV is there that a parked sequence has had."""
        num_pages = 0 if wait.end is None else wait.end.depth_pages
        return bool(sequence.table.pages) or num_pages * self._cache.page_size >= MOST * sequence.high_water

    def returned(self, sequence: Sequence, now: float) -> None:
        """A sequence that had nothing to do has work: until it gets its pages, it waits for the device alone."""
        wait = sequence.wait
        if sequence.tokens:
            self._note_end(sequence, now)
        if wait is not None:
            wait.kind, wait.since_s, wait.expected_s = WaitKind.QUEUE, now, None
            if wait.end is not None:
                self._cache.tiers.wait_changed(wait.end)
        sequence.wait_kind, sequence.expected_s = WaitKind.PROGRAM, None

    def became_idle(self, sequence: Sequence, wait: Wait) -> None:
        """A parked sequence has no operation left: it was cancelled, cut or failed before it got its pages, or a token
        that was in flight ended its operation after it was preempted. Then it does not wait for the device any more."""
        if wait.kind == WaitKind.QUEUE:
            wait.kind, wait.since_s, wait.expected_s = sequence.wait_kind, sequence.last_active_s, sequence.expected_s
            if wait.end is not None:
                self._cache.tiers.wait_changed(wait.end)

    def _note_end(self, sequence: Sequence, now: float) -> None:
        kind, since_s, expected_s = sequence.wait_kind, sequence.last_active_s, sequence.expected_s
        announced_s = math.nan if expected_s is None else expected_s - since_s
        self.waits.past.append(PastWait(sequence.tenant, kind, now - since_s, announced_s))
        if sequence.table.pages:
            self.waits.returns[label_of(kind), "kept"] += 1
        elif sequence.high_water:
            sequence.returned_kind = kind

    def count_return(self, sequence: Sequence, queued_s: float) -> None:
        """A sequence whose KV was in the index while it waited is admitted, `queued_s` after its operation arrived:
        note where its KV was."""
        self.waits.queued(sequence.tenant, queued_s)
        had = min(sequence.high_water, len(sequence.tokens) - 1)
        self._count_found(sequence, sequence.returned_kind, had)
        sequence.returned_kind = ""

    def _count_found(self, sequence: Sequence, kind: str, num_known: int) -> None:
        """A wait has ended, and of the first `num_known` tokens, which had KV, those have it that are computed."""
        found: Found = "kept"
        if sequence.num_computed < num_known:
            found = "recomputed"
        elif sequence.sources.counts(num_known).host:
            found = "host"
        self.waits.returned(kind, found)

    def unpark(self, sequence: Sequence, now: float) -> None:
        """The sequence has found what is left of its pages, or needs none of them."""
        if sequence.wait is not None:
            if sequence.retained is not None:
                self._cache.retention.detach(sequence.retained, now)
            self._cache.tiers.end_wait(sequence.wait)
            sequence.wait = None


def _num_written(sequence: Sequence) -> int:
    """Known tokens whose KV is written."""
    return min(sequence.num_written, len(sequence.tokens))
