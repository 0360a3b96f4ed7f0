"""Learned intervals for 80 % hold 75 to 85 % of unseen waits, whatever the time waited.

The waits are those of the mixture of APIServe's table 1, uniform over its kinds: mean and deviation of the times of
tools. Which distribution they have is not printed there: log-normal ones and normal ones cut off at zero are drawn,
seeded. Each wait is asked for before it is observed, so none is judged by a sample of itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.sched.policies.snapshots import make_runs
from weft.core.step import F64
from weft.sched.policies.estimators import LearnedEstimator
from weft.sched.policies.wait_samples import MAX_SAMPLES

MIXTURE = {
    "math": (9e-5, 6e-5),
    "qa": (0.69, 0.17),
    "ve": (0.09, 0.014),
    "chatbot": (28.6, 15.6),
    "image": (20.03, 7.8),
    "tts": (17.24, 7.6),
}
"""Seconds of a tool by kind: mean and deviation."""
KINDS = ("prefix", *MIXTURE)
ROUNDS = 2500
NOW = 1e5
PARTS = (0.0, 0.5, 0.9)
"""Quantiles of all waits of a kind; the wait in question has lasted so long."""
Draw = Callable[[np.random.Generator, float, float, int], F64]


def lognormal(generator: np.random.Generator, mean: float, deviation: float, count: int) -> F64:
    variance = np.log(1 + (deviation / mean) ** 2)
    return generator.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)


def cut_normal(generator: np.random.Generator, mean: float, deviation: float, count: int) -> F64:
    drawn = generator.normal(mean, deviation, 2 * count)
    return drawn[drawn > 0][:count]


@pytest.mark.slow
@pytest.mark.parametrize("draw", [lognormal, cut_normal])
def test_intervals_hold_as_many_unseen_waits_as_they_say(draw: Draw) -> None:
    generator = np.random.default_rng(14)
    waits = np.stack([draw(generator, *MIXTURE[kind], ROUNDS) for kind in KINDS[1:]], axis=1)
    waited = np.quantile(waits, PARTS, axis=0)
    waited[0] = 0.0
    # A row for each part and kind; the snapshot is the same in all rounds.
    kind = np.tile(np.arange(1, len(KINDS)), len(PARTS))
    runs = make_runs(len(kind), since_s=NOW - waited.ravel(), kind=kind, kinds=KINDS)
    elapsed = NOW - runs.since_s
    estimator = LearnedEstimator()
    held, asked = np.zeros(len(kind)), np.zeros(len(kind))
    below = np.zeros(len(kind))
    for number, row in enumerate(waits):
        if number >= MAX_SAMPLES:
            low, high = estimator.interval_s(runs, NOW, 0.8)
            median = estimator.remaining_s(runs, NOW)
            wait_s = np.tile(row, len(PARTS))
            lasted = wait_s >= elapsed
            still = wait_s - elapsed
            asked += lasted
            held += lasted & (low <= still) & (still <= high)
            below += lasted & (still < median)
        for name, wait_s in zip(KINDS[1:], row, strict=True):
            estimator.observe("t", name, float(wait_s))
    asked, held, below = (column.reshape(len(PARTS), -1).sum(axis=1) for column in (asked, held, below))
    assert (asked > 1000).all()
    assert (held / asked >= 0.75).all(), held / asked
    assert (held / asked <= 0.85).all(), held / asked
    assert below / asked == pytest.approx(0.5, abs=0.05)
