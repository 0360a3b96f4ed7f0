"""`preserve`: intercepted sequences keep all their KV on the device (APIServe, section 3.2)."""

from __future__ import annotations

import numpy as np

from weft.cache.runs import PageRuns
from weft.core.step import F64
from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.runs import NEVER, Load


class PreservePolicy(LruPolicy):
    """Only cached prefixes that nothing waits for are given up, the least recently used first."""

    name = "preserve"

    def rank(self, runs: PageRuns, load: Load, *, may_move: bool = True) -> F64:
        """[n] time of the last use; of a wait, never."""
        return np.where(runs.kind > 0, NEVER, super().rank(runs, load))
