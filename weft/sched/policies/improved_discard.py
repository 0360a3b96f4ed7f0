"""`improved_discard`: as `discard`, but a return keeps its place in the queue (APIServe, section 3.2)."""

from __future__ import annotations

from weft.sched.policies.discard import DiscardPolicy


class ImprovedDiscardPolicy(DiscardPolicy):
    """KV goes at the moment of interception and is computed again in the order of first arrival."""

    name = "improved_discard"
    keeps_rank = True
