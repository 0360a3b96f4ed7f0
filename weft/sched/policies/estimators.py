"""How long a wait will still take, given how long it has taken: `elapsed`, `learned`, `oracle`.

All answer for every row of a snapshot at once. A prefix that nothing waits for is estimated as a wait of kind "prefix"
since its last use.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from weft.cache.runs import UNUSED, PageRuns
from weft.core.step import F64, Bool
from weft.core.waits import ExpectedBy, without_cohort
from weft.sched.policies.wait_samples import LASTED_ENOUGH, Lasted, WaitSamples


class WaitEstimator(Protocol):
    """Estimates of the time *still* to come, in seconds."""

    @property
    def name(self) -> str:
        """The value of `wait_estimator` that selects it."""
        ...

    def remaining_s(self, runs: PageRuns, now: float) -> F64:
        """[n] seconds until each return, or the next use of a prefix; not negative."""
        ...

    def expected_by(self, runs: PageRuns, now: float) -> list[ExpectedBy]:
        """[n] what `remaining_s` rests on. `runs` have no `sooner_s`."""
        ...

    def is_own(self, runs: PageRuns, now: float) -> Bool:
        """[n] whether the answers rest on no waits of other tenants."""
        ...

    def return_chance(self, runs: PageRuns, now: float) -> F64:
        """[n] the probability that a run is used again."""
        ...

    def own_chance(self, runs: PageRuns, now: float) -> F64:
        """[n] the same, as far as the tenant's own waits tell: another tenant cannot lower it."""
        ...

    def is_known(self, runs: PageRuns, now: float) -> Bool:
        """[n] whether the answers rest on enough waits of the kind, or on an announced return."""
        ...

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """A wait ended after `wait_s` seconds; without `ended`, its run was given up after so long, before it did.
        `kind`: with its cohort where it has one."""
        ...

    def group(self, tenant: str, kind: str) -> str:
        """The kind, with its cohort or without, as which a new wait of a tenant is estimated."""
        ...


def elapsed_s(runs: PageRuns, now: float) -> F64:
    """[n] the time waited so far."""
    return np.maximum(now - runs.since_s, 0.0)


class ElapsedEstimator:
    """As long again as it took so far, also where a return is announced (APIServe, section 4.4). Needs no samples, and
    is about right for waits of which nothing is known."""

    name = "elapsed"

    def remaining_s(self, runs: PageRuns, now: float) -> F64:
        """[n] the time waited so far."""
        return elapsed_s(runs, now)

    def expected_by(self, runs: PageRuns, now: float) -> list[ExpectedBy]:
        """[n] the time waited so far."""
        return ["elapsed"] * len(runs.since_s)

    def is_own(self, runs: PageRuns, now: float) -> Bool:
        """[n] ones: the answers rest on no waits at all."""
        return np.ones(len(runs.since_s), np.bool_)

    def return_chance(self, runs: PageRuns, now: float) -> F64:
        """[n] ones: every wait is taken to end with a return."""
        return np.ones(len(runs.since_s))

    own_chance = return_chance

    def is_known(self, runs: PageRuns, now: float) -> Bool:
        """[n] zeros: nothing is known of any wait."""
        return np.zeros(len(runs.since_s), np.bool_)

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """Nothing is learned from a wait."""

    def group(self, tenant: str, kind: str) -> str:
        """The kind alone."""
        return without_cohort(kind)


def _or_sooner(remaining_s: F64, runs: PageRuns, now: float) -> F64:
    """[n] the time to what `PageRuns.sooner_s` announces for later than now, where that is shorter."""
    if runs.sooner_s is None or not (announced := runs.sooner_s > now).any():
        return remaining_s
    return np.where(announced, np.minimum(remaining_s, runs.sooner_s - now), remaining_s)


def _is_announced(runs: PageRuns, now: float) -> Bool:
    """[n] where a return is announced for later than now."""
    announced: Bool = runs.expected_s > now
    return announced if runs.sooner_s is None else announced | (runs.sooner_s > now)


class OracleEstimator:
    """The announced return, for simulations that know it. `elapsed` where none is announced."""

    name = "oracle"

    def remaining_s(self, runs: PageRuns, now: float) -> F64:
        """[n] seconds to the announced return; 0 where it is overdue."""
        known = np.maximum(runs.expected_s - now, 0.0)
        return _or_sooner(np.where(np.isnan(known), elapsed_s(runs, now), known), runs, now)

    def expected_by(self, runs: PageRuns, now: float) -> list[ExpectedBy]:
        """[n] the announcement, also where it is overdue."""
        return ["elapsed" if is_missing else "announced" for is_missing in np.isnan(runs.expected_s).tolist()]

    def is_own(self, runs: PageRuns, now: float) -> Bool:
        """[n] ones: the answers rest on no other waits."""
        return np.ones(len(runs.since_s), np.bool_)

    def return_chance(self, runs: PageRuns, now: float) -> F64:
        """[n] 0 where nothing was announced and nothing has used the run; else 1."""
        is_unused = np.array([kind == UNUSED for kind in runs.kinds])[runs.kind]
        return np.where(is_unused & np.isnan(runs.expected_s), 0.0, 1.0)

    own_chance = return_chance

    def is_known(self, runs: PageRuns, now: float) -> Bool:
        """[n] where a return was announced."""
        return ~np.isnan(runs.expected_s)

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """Nothing is learned from a wait."""

    def group(self, tenant: str, kind: str) -> str:
        """The kind alone."""
        return without_cohort(kind)


class LearnedEstimator:
    """The median of what was still to come in earlier waits of the same kind that lasted as long.

    From the tenant's own waits of the kind and cohort if there are at least `ENOUGH`, else from its other waits of the
    kind, else from those of all tenants, else as `elapsed`; also as `elapsed` where fewer than `LASTED_ENOUGH` of these
    waits lasted so long. A return that is announced for later than now is believed.
    """

    name = "learned"

    def __init__(self) -> None:
        self._samples = WaitSamples()
        self._last: tuple[PageRuns, float, Lasted] | None = None

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """Learn from a wait that lasted `wait_s` seconds, until it ended or its run was given up."""
        self._last = None
        self._samples.add(tenant, kind, wait_s, ended=ended, since_s=since_s)

    def group(self, tenant: str, kind: str) -> str:
        """With its cohort if there are enough waits of it."""
        return kind if self._samples.has_cohort(tenant, kind) else without_cohort(kind)

    def remaining_s(self, runs: PageRuns, now: float) -> F64:
        """[n] seconds: the announced time of return, or the median of what was still to come in earlier waits of the
        kind."""
        lasted = self._lasted(runs, now)
        found = lasted.waited_s
        known = lasted.num_ended >= LASTED_ENOUGH
        if known.any():
            found = np.where(known, lasted.remaining_s(0.5), found)
        announced = runs.expected_s > now
        if announced.any():
            found = np.where(announced, runs.expected_s - now, found)
        return _or_sooner(found, runs, now)

    def expected_by(self, runs: PageRuns, now: float) -> list[ExpectedBy]:
        """[n] an announcement for later than now, or `LASTED_ENOUGH` waits that lasted as long."""
        known = (self._lasted(runs, now).num_ended >= LASTED_ENOUGH).tolist()
        announced = (runs.expected_s > now).tolist()
        return [
            "announced" if is_announced else "learned" if is_known else "elapsed"
            for is_announced, is_known in zip(announced, known, strict=True)
        ]

    def is_own(self, runs: PageRuns, now: float) -> Bool:
        """[n] whether the waits that lasted as long are the tenant's."""
        is_own: Bool = self._samples.is_own.take(self._lasted(runs, now).slots)
        return is_own

    def return_chance(self, runs: PageRuns, now: float) -> F64:
        """[n] from the waits that lasted as long. Where fewer than `LASTED_ENOUGH` did, as for the longest wait of
        which so many are known: what has waited for longer must not count as more likely to be used."""
        return self._lasted(runs, now).chance

    def is_known(self, runs: PageRuns, now: float) -> Bool:
        """[n] where `LASTED_ENOUGH` of the waits lasted as long, or a return is announced for later than now."""
        lasted = self._lasted(runs, now)
        return (lasted.num_ended + lasted.num_given_up >= LASTED_ENOUGH) | _is_announced(runs, now)

    def own_chance(self, runs: PageRuns, now: float) -> F64:
        """[n] as `return_chance`, and 1 where too few of the tenant's own waits are known."""
        return np.where(self.is_own(runs, now), self.return_chance(runs, now), 1.0)

    def interval_s(self, runs: PageRuns, now: float, coverage: float) -> tuple[F64, F64]:
        """Two [n]: between which the remaining time lies with probability `coverage`, as much below as above.

        (0, inf) where too little is known; both the announced time where a return is announced for later than now.
        Neither is later than what `PageRuns.sooner_s` announces.
        """
        lasted = self._lasted(runs, now)
        known = lasted.num_ended >= LASTED_ENOUGH
        announced = runs.expected_s > now
        bounds = []
        for part, unknown in (((1.0 - coverage) / 2.0, 0.0), ((1.0 + coverage) / 2.0, np.inf)):
            bound = np.where(known, lasted.remaining_s(part), unknown)
            bounds.append(_or_sooner(np.where(announced, runs.expected_s - now, bound), runs, now))
        return bounds[0], bounds[1]

    def _lasted(self, runs: PageRuns, now: float) -> Lasted:
        if self._last is not None and self._last[0] is runs and self._last[1] == now:
            return self._last[2]
        table = self._samples.slots(runs.tenants, runs.kinds).reshape(-1)
        slots = table.take(runs.tenant * len(runs.kinds) + runs.kind if runs.tenants else runs.kind)
        self._last = runs, now, self._samples.lasted(slots, elapsed_s(runs, now))
        return self._last[2]
