"""`RecomputeShare`: the part of the recent time that went into computing KV again.

It tells overload, in which KV is given up that is needed soon, from a device that is merely full. Pure: `now` is an
argument. Owned by `Interception`, told by the step planner, asked by `Reclaimer`.
"""

from __future__ import annotations

import math

import numpy as np

from weft.core.cost.model import CostModel, StepShape

HORIZON_S = 60.0
"""Time constant of the average: what is so long ago counts e times less. Large returns are computed again in bursts of
seconds; between 30 and 120 s simulated jobs of agents take the same time, with 10 s a third longer."""
BESIDE = StepShape.decodes(1, 0)
"""Recomputation is costed as what it adds to a step that is computed anyway."""


class RecomputeShare:
    """An exponential average of predicted seconds per second."""

    def __init__(self, costs: CostModel | None):
        """None: nothing is predicted, and the share stays 0."""
        self._costs = costs
        self._share = 0.0
        self._at_s = 0.0

    def note(self, num_tokens: int, now: float) -> None:
        """A step computes so many tokens again."""
        if self._costs is not None:
            seconds = self._costs.predict_added_s(BESIDE, np.array([float(num_tokens)]), np.zeros(1))
            self._share = self.at(now) + float(seconds[0]) / HORIZON_S
            self._at_s = now

    def at(self, now: float) -> float:
        """The part of the recent time; 0: no KV was computed again."""
        return self._share * math.exp((self._at_s - now) / HORIZON_S) if self._share else 0.0
