"""`lru`: plain prefix caching. The run whose last use is longest ago goes first, waited for or not."""

from __future__ import annotations

import math

import numpy as np

from weft.cache.runs import PageRuns
from weft.core.step import F64, Bool
from weft.sched.policies.runs import START, Load, keep_pins


class LruPolicy:
    """By last use alone: tenants' shares and weights change nothing. A pin is kept, as it is by every policy.

    Also the base of the policies that differ from it in what they do at the moment of interception.
    """

    name = "lru"
    keeps_rank = True
    uses_index = True
    acts_at_start = False
    preserves = False

    def at_start(self, kind: str) -> START:
        """Kept until its pages are needed."""
        return "keep"

    def rank(self, runs: PageRuns, load: Load, *, may_move: bool = True) -> F64:
        """[n] time of the last use."""
        return keep_pins(runs.since_s, runs)

    def moves(self, runs: PageRuns, load: Load) -> Bool:
        """[n] ones: everything, as far as the host has room."""
        return np.ones(len(runs.since_s), np.bool_)

    def kept(self, runs: PageRuns, load: Load) -> Bool:
        """[n] zeros: no run is kept from others, so age alone decides."""
        return np.zeros(len(runs.since_s), np.bool_)

    def spares(self, runs: PageRuns, load: Load) -> Bool:
        """[n] zeros: newcomers get pages as everything else does."""
        return np.zeros(len(runs.since_s), np.bool_)

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """Nothing is learned from a wait."""
