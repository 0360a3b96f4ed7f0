"""`preserve`: intercepted sequences keep all their KV on the device (APIServe, section 3.2)."""

from __future__ import annotations

import numpy as np

from weft.cache.runs import UNUSED_KIND, PageRuns
from weft.core.step import F64, Bool
from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.runs import NEVER, Load


class PreservePolicy(LruPolicy):
    """Only cached prefixes that nothing waits for are given up, the least recently used first."""

    name = "preserve"
    preserves = True

    def rank(self, runs: PageRuns, load: Load, *, may_move: bool = True) -> F64:
        """[n] time of the last use; of a wait, never."""
        return np.where(runs.kind > UNUSED_KIND, NEVER, super().rank(runs, load))

    def spares(self, runs: PageRuns, load: Load) -> Bool:
        """[n] whether something waits for the run."""
        return runs.kind > UNUSED_KIND
