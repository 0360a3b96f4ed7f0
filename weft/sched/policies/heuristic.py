"""`heuristic`: discard for long waits, preserve for short ones, by kind (APIServe, section 5.2)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from weft.cache.runs import PREFIX, UNUSED, PageRuns
from weft.core.step import F64, Bool
from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.runs import NEVER, START, Load

LONG_KINDS = frozenset({"chat", "chatbot", "image", "people", "tts"})
"""Kinds of wait that a person takes part in, or that run another large model."""


class HeuristicPolicy(LruPolicy):
    """Interactive and long-running kinds are discarded at once; automated short ones keep their KV on the device."""

    name = "heuristic"
    acts_at_start = True
    preserves = True

    def __init__(self, long_kinds: Collection[str] = LONG_KINDS):
        self._long_kinds = frozenset(long_kinds)

    def at_start(self, kind: str) -> START:
        """Given up at once where the kind is a long one."""
        return "discard" if kind in self._long_kinds else "keep"

    def rank(self, runs: PageRuns, load: Load, *, may_move: bool = True) -> F64:
        """[n] time of the last use; of a short wait, never."""
        return np.where(self._is_short(runs), NEVER, super().rank(runs, load))

    def spares(self, runs: PageRuns, load: Load) -> Bool:
        """[n] whether the wait for the run is a short one."""
        return self._is_short(runs)

    def _is_short(self, runs: PageRuns) -> Bool:
        short = np.array([kind not in self._long_kinds and kind not in (PREFIX, UNUSED) for kind in runs.kinds])
        return short[runs.kind]


class BudgetedHeuristicPolicy(HeuristicPolicy):
    """Of long kinds, as many pages move to the host as the step's budget of copies allows (APIServe, section 5.2)."""

    name = "budgeted_heuristic"

    def at_start(self, kind: str) -> START:
        """Moved to the host in part where the kind is a long one."""
        return "swap_in_budget" if kind in self._long_kinds else "keep"
