"""`swap`: an intercepted sequence moves to the host at once, as a whole (APIServe, section 3.2), or within a budget."""

from __future__ import annotations

from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.runs import START


class SwapPolicy(LruPolicy):
    """Out at the moment of interception and in at the return, synchronously. The rest goes by last use."""

    name = "swap"
    acts_at_start = True

    def at_start(self, kind: str) -> START:
        """Move the KV of every sequence to the host when its wait begins."""
        return "swap"


class BudgetedSwapPolicy(SwapPolicy):
    """As far as the step's budget of copies goes; the rest is discarded (APIServe, section 5.2)."""

    name = "budgeted_swap"

    def at_start(self, kind: str) -> START:
        """Moved to the host in part."""
        return "swap_in_budget"
