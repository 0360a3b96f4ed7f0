"""`PageRuns`: what can be given up of the prefix index, as a frozen snapshot for policies."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from weft.core.step import F64, I64, Bool
from weft.core.waits import WaitKind

PREFIX = WaitKind.PREFIX.value
"""Kind 0 of every snapshot: a run of a cached prefix that nothing is known to wait for, and that has been of use to
another sequence than its first."""
UNUSED = WaitKind.UNUSED.value
"""Kind 1: a run that nothing is known to wait for, and that has not been of use yet."""
UNUSED_KIND = 1
"""Index of `UNUSED` in the kinds of every snapshot. Those behind it are of runs that something waits for."""


class PageRuns(NamedTuple):
    """The runs of pages that could be given up: one row for each leaf of the prefix index that nobody runs on.

    All times are seconds of one clock.
    """

    since_s: F64
    """[n] start of the wait; of a run that nothing waits for, its last use. Of several waits, that of the one without
    an announced return that began last, as it is expected to end first, else of the one with the earliest."""
    expected_s: F64
    """[n] announced time of return of that wait; nan where none was announced."""
    kind: I64
    """[n] index into `kinds`."""
    num_tokens: I64
    """[n] the context C: tokens from the start of the sequence to the end of the run."""
    num_pages: I64
    """[n] device pages that giving up the run frees; at least 1."""
    num_behind: I64
    """[n] tokens behind the run that only the host has: lost with it where it is forgotten."""
    has_copy: Bool
    """[n] a valid copy of the run is on the host."""
    over_share: Bool
    """[n] the tenant holds more than its fair share of the intercepted KV."""
    weight: F64
    """[n] of a retain: 0 none, larger is kept longer, inf is a pin."""
    order: I64
    """[n] unique; decides between runs of equal rank, the smaller first."""
    tenant: I64
    """[n] index into `tenants`."""
    explicit: Bool
    """[n] the pages are a program's own: they may stay or move to the host, and nothing can compute them again."""
    kinds: tuple[str, ...] = (PREFIX, UNUSED)
    tenants: tuple[str, ...] = ()
    """Names of the tenants; empty where they are not told apart."""
    is_shared: bool = False
    """Whether several tenants hold KV."""
    sooner_s: F64 | None = None
    """[n] beside a wait without an announced return, the earliest return that another one has announced, or nan. A run
    is needed again at the earlier of both. None: no run has such waits."""


class Ranking(NamedTuple):
    """What a policy says of runs."""

    values: F64
    """[n] the run with the smallest value is given up first."""
    moves: Bool
    """[n] whether a run that is given up is worth a copy on the host."""
    kept: Bool
    """[n] whether a run is kept from tenants that exceed their fair share. All others have smaller values."""
    spared: Bool
    """[n] whether a newcomer waits rather than have the run given up, as long as other sequences run."""
    forgotten: F64
    """[n] the values of runs that the step cannot move any more, so that they would be forgotten; no smaller ones."""


class Ranker(Protocol):
    """Says which runs go first. Must depend on the arguments alone."""

    def __call__(self, runs: PageRuns, now: float) -> Ranking:
        """Values of all rows."""
        ...


def least_recently_used(runs: PageRuns, now: float) -> Ranking:
    """Runs that are retained after all others, then by the time of the last use."""
    values = np.where(runs.weight > 0, 1e18, 0.0) + runs.since_s
    none = np.zeros(len(values), np.bool_)
    return Ranking(values, np.ones(len(values), np.bool_), none, none, values)
