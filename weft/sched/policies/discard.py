"""`discard`: what engines do that do not know interceptions. A return is a new request (APIServe, section 3.2)."""

from __future__ import annotations

import numpy as np

from weft.cache.runs import PageRuns
from weft.core.step import F64
from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.runs import START, Load


class DiscardPolicy(LruPolicy):
    """KV goes at the moment of interception, nothing of it is found again, and a return queues last."""

    name = "discard"
    keeps_rank = False
    uses_index = False

    def at_start(self, kind: str) -> START:
        """Give up the KV of every sequence when its wait begins."""
        return "discard"

    def copy_value(self, runs: PageRuns, load: Load) -> F64:
        """[n] zeros: nothing is read back."""
        return np.zeros(len(runs.since_s))
