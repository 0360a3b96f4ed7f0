"""`min_waste`, the default: the run whose giving up wastes least for what it frees goes first (APIServe, section 4.3).

The paper decides for each wait whether preserving or discarding wastes less (equation 5), and acts at once. Here
nothing is given up before its pages are needed, so the question is which runs are to make room. To give up run i wastes
W_i: its recomputation (equation 4) or, if it has or can get a copy on the host, its swap (equation 3 without the part
that forwards hide). It frees its r_i tokens for the time T_i that its wait still takes, which is the T_i * r_i of
preserving it (equation 2). Room is thus bought in token-seconds, at a price of W_i / (T_i * r_i) each, and a demand for
room is met at least waste by taking the cheapest first. That is why a *ratio* gives the order: the difference
W_i - T_i * r_i grows with the size of a run, and would take one large run that frees little time per token of waste
before many small ones that free more.

Equation 5 is the same quantity against 1: discarding wastes less than preserving exactly where W_i < T_i * r_i, that
is, where the ratio is below 1. Where pages are needed and no ratio is below 1, giving up still costs least at the
smallest one; the sequence in need could otherwise not run.

The paper's sequences all return. Here some runs are of no use any more: what a sequence leaves behind when it is
closed, and the turn of a client that says no more. W_i is only wasted if the run is used again, so it counts times the
chance of that, which the estimator knows from runs of the same kind, and so does bringing it back from the host; a
copy there is only made of a run that is worth one by the same measure. Where a step cannot copy more, W_i is the
recomputation, of what only the host has behind the run too: then one that has a copy may go first.

The explicit pages of a program cannot be computed again: to discard them wastes infinitely much, so W_i is that of the
swap.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weft.cache.runs import UNUSED_KIND, PageRuns
from weft.core.step import F64, Bool
from weft.core.waits import WaitKind
from weft.sched.policies.estimators import WaitEstimator, elapsed_s
from weft.sched.policies.runs import NEVER, START, Load, keep_pins
from weft.sched.policies.waste import RunSizes, recompute_waste, swap_waste, waste_preserve

KEPT_S = 600.0
"""For how long a run is kept after its last use, or the beginning of its wait: tools, readers of an answer and cached
prompts are mostly back within ten minutes, and a tenant that has gone takes no room from others for longer."""
KEPT_CHANCE = 0.05
"""A tenant that loses what it uses less often than this computes at most 5 % of it again."""
SPARED_FROM = 0.1
"""Ratio from which on newcomers do not take a run. Equation 5 would have 1, if a newcomer did nothing but work with the
memory. But its session waits too, and computes for a small part of the time for which it holds KV: that part is what
the memory is worth to it. Of 1, 0.1, 0.05 and 0.02, a tenth is best for simulated agents (jobs), and 0.05 for the
simulated mixture of interceptions."""
SOONEST_S = 1e-6
"""A wait that may end at any moment counts as taking so long still."""
LEAST_CHANCE = 1e-6
"""That a run is used again: of those that hardly ever are, the order is still that of waits."""
BOOKKEEPING_S = 1e-6
"""Added to the waste of giving up, per token of the run: of runs that cost nothing to give up, those with the longest
wait go first."""


class MinWastePolicy:
    """A weight w multiplies the ratio by 1 + w; a pin never goes. Where several tenants hold KV, runs go in this order,
    and by ratio among themselves: those of tenants over their fair share; those within it that their tenant will hardly
    miss; those that are *kept* for it.

    For a prefix that nothing waits for, the time until its next use is estimated as for a wait: from the time since its
    last use, or from observed intervals between uses (kind "prefix").
    """

    name = "min_waste"
    keeps_rank = True
    uses_index = True
    acts_at_start = False
    preserves = False

    def __init__(self, estimator: WaitEstimator):
        self.estimator = estimator
        self._last: tuple[PageRuns, Load, _Assessment] | None = None

    def at_start(self, kind: str) -> START:
        """Kept until its pages are needed."""
        return "keep"

    def rank(self, runs: PageRuns, load: Load, *, may_move: bool = True) -> F64:
        """[n] waste of giving up divided by waste of preserving: a ratio r. Where several tenants hold KV, -1 - 1 / r
        for those over their share and -1 / (1 + r) for what is not kept, which are both in the order of r."""
        found = self._assess(runs, load)
        ratio = found.ratio if may_move else found.forgotten
        if runs.is_shared:
            not_kept = np.where(runs.over_share, -1.0 - 1.0 / ratio, -1.0 / (1.0 + ratio))
            ratio = np.where(self.kept(runs, load), ratio, not_kept)
        return keep_pins(ratio, runs)

    def moves(self, runs: PageRuns, load: Load) -> Bool:
        """[n] where a swap wastes less than recomputing, times the chance of it."""
        found = self._assess(runs, load)
        return found.swap < found.recompute

    def kept(self, runs: PageRuns, load: Load) -> Bool:
        """[n] where a tenant within its share is likely to miss the run: something waits for it or has found it, within
        the last `KEPT_S` or as one that has returned, and of the tenant's own runs of the kind at least `KEPT_CHANCE`
        were used again."""
        if not runs.is_shared:
            return np.zeros(len(runs.since_s), np.bool_)
        is_missed = (elapsed_s(runs, load.now) <= KEPT_S) | _has_returned(runs)
        is_missed &= self.estimator.own_chance(runs, load.now) >= KEPT_CHANCE
        is_missed &= runs.kind != UNUSED_KIND
        return ~runs.over_share & (is_missed | (runs.weight > 0))

    def spares(self, runs: PageRuns, load: Load) -> Bool:
        """[n] where something waits for the run, for the device alone or in a kind of which enough waits are known, and
        the ratio is `SPARED_FROM` at least. None without a cost profile, since a ratio of unmeasured times says
        nothing, none of tenants over their fair share, and no explicit pages, which newcomers get only where they
        move."""
        if load.costs is None:
            return np.zeros(len(runs.since_s), np.bool_)
        is_awaited = (runs.kind > UNUSED_KIND) & ~runs.over_share & ~runs.explicit
        is_known = self.estimator.is_known(runs, load.now) | _has_returned(runs)
        return is_awaited & is_known & (self._assess(runs, load).ratio >= SPARED_FROM)

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """A wait ended, or its run was given up before: the estimator learns from it."""
        self.estimator.observe(tenant, kind, wait_s, ended=ended, since_s=since_s)
        self._last = None

    def _assess(self, runs: PageRuns, load: Load) -> _Assessment:
        """Of one snapshot once, however often it is asked for."""
        if self._last is None or self._last[0] is not runs or self._last[1] is not load:
            sizes = RunSizes.of(runs, load)
            remaining_s = self._remaining_s(runs, load)
            chance = np.maximum(self.estimator.return_chance(runs, load.now), LEAST_CHANCE)
            recompute = recompute_waste(sizes.with_behind(runs.num_behind), load) * chance
            recompute = np.where(runs.explicit, NEVER, recompute)
            swap = swap_waste(runs, sizes, load, chance)
            movable = runs.has_copy | (runs.num_pages <= load.host_pages)
            give_up = np.where(movable, np.minimum(recompute, swap), recompute)
            preserve = waste_preserve(remaining_s, sizes.held)
            bookkeeping = BOOKKEEPING_S * sizes.held * chance
            ratio, forgotten = (give_up + bookkeeping) / preserve, (recompute + bookkeeping) / preserve
            if runs.weight.any():
                ratio, forgotten = ratio * (1.0 + runs.weight), forgotten * (1.0 + runs.weight)
            self._last = (runs, load, _Assessment(recompute, swap, ratio, forgotten))
        return self._last[2]

    def _remaining_s(self, runs: PageRuns, load: Load) -> F64:
        """[n] until the KV is needed: the time to the return, and that for which the tenant's returns wait for the
        device. At least `SOONEST_S`, but for sequences that wait for the device alone: they run as soon as there is
        room, the first that came the first."""
        remaining_s = self.estimator.remaining_s(runs, load.now)
        if load.queued_s and runs.tenants:
            by_tenant = [load.queued_s.get(tenant, 0.0) for tenant in runs.tenants]
            remaining_s = remaining_s + np.array(by_tenant).take(runs.tenant)
        remaining_s = np.maximum(remaining_s, SOONEST_S)
        queued = _has_returned(runs).nonzero()[0]
        if len(queued):
            remaining_s[queued] = SOONEST_S / (1.0 + elapsed_s(runs, load.now)[queued])
        return remaining_s


def _has_returned(runs: PageRuns) -> Bool:
    """[n] where what waits for the run waits for the device alone."""
    if WaitKind.QUEUE not in runs.kinds:
        return np.zeros(len(runs.kind), np.bool_)
    found: Bool = runs.kind == runs.kinds.index(WaitKind.QUEUE)
    return found


class _Assessment(NamedTuple):
    """Of the runs of a snapshot, each [n]. Waste is in token-seconds."""

    recompute: F64
    """Waste of computing again the run and what only the host has behind it, times the chance that it is needed."""
    swap: F64
    """Waste of moving it out, where there is no copy; and in, times the same chance."""
    ratio: F64
    """Waste of giving up, in the cheaper way of those possible, divided by waste of preserving, times 1 + weight."""
    forgotten: F64
    """The same where it cannot move."""
