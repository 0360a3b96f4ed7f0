"""`StepShare`: how much of a step throughput and batch work gets beside work whose latency matters.

The sequences of a step are of two kinds. *Foreground*: objective `latency` or `ttft`, or `deadline` without slack.
*Background*: all others. Beside foreground that decodes, background work
lengthens a step by at most `latency_factor` - 1 times what those rows alone would take, by the cost model; beside
prompts alone, by so many times what these take. So a latency sequence's time per output token is at most the factor
times what it would be without background. (Were prompts to count where others decode, more of them would fall on each
token of a sequence that takes longer, and each would be longer too.)

The background gets at least `min_share` of the device's time nevertheless. Where the factor leaves less, it gives way.
What the background did not get for want of room is *owed* to it, and as soon as that is enough, a step takes one piece
more than fits: a row that decodes, or a page of a prompt. No more is owed than `min_share` of `WINDOW_S`, so over any
such window the share is kept but for one piece.

Without a cost profile nothing can be predicted, and nothing is held back.

Owns no state: decisions depend on their arguments alone. `ServiceClasses` asks, for the step planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.core.cost.model import CostModel, StepShape
from weft.core.step import I64

WINDOW_S = 10.0
"""Seconds of the device over which the background gets its share."""
ROUNDING = 1e-9
EMPTY = StepShape(0, 0, 0, 0, 0, 0)


class ShareView(NamedTuple):
    """The work in a step being built, foreground and background, and the time owed to the background."""

    foreground: StepShape
    """What of it is foreground."""
    decoding: StepShape
    """What of the foreground are rows that decode."""
    background: StepShape
    """What of it is background, so far."""
    owed_s: float
    """Seconds that the background is owed from steps before."""


def held_factor(latency_factor: float, min_share: float) -> float:
    """How many times as long the background takes at most beside foreground that is always there: a step of
    `latency_factor` times the foreground's time has room for the rest of it, or for `min_share` of the step."""
    room = max(1.0 - 1.0 / latency_factor, min_share)
    return 1.0 / room if room else math.inf


class StepShare:
    """Decides how many rows and tokens of the background join a step."""

    def __init__(self, costs: CostModel | None, latency_factor: float, min_share: float):
        self._costs = costs
        self._factor = latency_factor
        self._min_share = min_share

    @property
    def costs(self) -> CostModel | None:
        """Predicted times; None: there is no profile."""
        return self._costs

    @property
    def factor(self) -> float:
        """How much longer a step may take than its foreground alone, as a factor."""
        return self._factor

    @property
    def most_owed_s(self) -> float:
        """No more time than this is owed."""
        return self._min_share * WINDOW_S

    def num_rows(self, view: ShareView, kv: I64) -> int:
        """How many background sequences decode in this step: the first of those with `kv` [n] KV entries each, the
        tokens to come included."""
        if self._costs is None or not view.foreground.num_tokens:
            return len(kv)
        sums = np.cumsum(kv)

        def shape(count: int) -> StepShape:
            return StepShape.decodes(count, int(sums[count - 1]))

        return self._largest(view, shape, 1, len(kv))

    def num_tokens(self, view: ShareView, kv_before: int, most: int, least: int) -> int:
        """How many tokens of a background prompt, of which `kv_before` have KV, join this step: `most`, or fewer but at
        least `least`, or none."""
        if self._costs is None or not view.foreground.num_tokens:
            return most
        return self._largest(view, lambda count: StepShape.chunk(count, kv_before, 1), min(least, most), most)

    def owed_after(self, view: ShareView) -> float:
        """Seconds owed after a step, where the background had work and `view` is what became of the step."""
        if self._costs is None or not view.foreground.num_tokens:
            return 0.0
        alone_s = self._costs.predict_forward_s(view.foreground)
        whole_s = self._costs.predict_forward_s(view.foreground.plus(view.background))
        owed_s = view.owed_s + self._min_share * whole_s - (whole_s - alone_s)
        return min(max(owed_s, 0.0), self.most_owed_s)

    def _largest(self, view: ShareView, shape: Callable[[int], StepShape], least: int, most: int) -> int:
        """The largest count from `least` to `most` whose shape fits into the step, and `least` more where so much is
        owed and nothing before it was; 0 where none does."""
        costs = self._costs
        assert costs is not None
        if most < least or most <= 0:
            return 0
        so_far = view.foreground.plus(view.background)
        alone_s, so_far_s = costs.predict_forward_s(view.foreground), costs.predict_forward_s(so_far)
        share = self._min_share
        held_s = costs.predict_forward_s(view.decoding) if view.decoding.num_tokens else alone_s
        room_s = max((self._factor - 1.0) * held_s, share / (1.0 - share) * alone_s)
        allowed_s = (alone_s + room_s) * (1.0 + ROUNDING)

        def whole_s(count: int) -> float:
            return costs.predict_forward_s(so_far.plus(shape(count)))

        if whole_s(most) <= allowed_s:
            return most
        fits = 0
        if whole_s(least) <= allowed_s:
            fits, too_many = least, most
            while too_many - fits > 1:
                middle = (fits + too_many) // 2
                if whole_s(middle) <= allowed_s:
                    fits = middle
                else:
                    too_many = middle
        if share and so_far_s <= allowed_s:
            more = min(fits + least, most)
            missing_s = (1.0 - share) * whole_s(more) - alone_s
            if min(missing_s, self.most_owed_s) <= view.owed_s:
                return more
        return fits
