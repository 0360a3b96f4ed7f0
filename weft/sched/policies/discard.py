"""`discard`: what engines do that do not know interceptions. A return is a new request (APIServe, section 3.2)."""

from __future__ import annotations

from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.runs import START


class DiscardPolicy(LruPolicy):
    """KV goes at the moment of interception, nothing of it is found again, and a return queues last."""

    name = "discard"
    keeps_rank = False
    uses_index = False
    acts_at_start = True

    def at_start(self, kind: str) -> START:
        """Give up the KV of every sequence when its wait begins."""
        return "discard"
