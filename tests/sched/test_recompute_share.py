"""The part of the time that goes into recomputation: an average that forgets."""

from __future__ import annotations

import math

import pytest

from tests.sched.policies.snapshots import line
from weft.sched.recompute_share import HORIZON_S, RecomputeShare


def test_a_steady_share_is_found() -> None:
    # Every second 250 tokens of 1 ms each: a quarter of the time.
    share = RecomputeShare(line(per_token_s=0.001))
    for now in range(400):
        share.note(250, float(now))
    assert share.at(399.0) == pytest.approx(0.25, rel=0.02)


def test_it_is_forgotten() -> None:
    share = RecomputeShare(line(per_token_s=0.001))
    assert share.at(5.0) == 0.0
    share.note(1000, 5.0)
    assert share.at(5.0) == pytest.approx(1.0 / HORIZON_S)
    assert share.at(5.0 + HORIZON_S) == pytest.approx(1.0 / HORIZON_S / math.e)


def test_nothing_is_known_without_costs() -> None:
    share = RecomputeShare(None)
    share.note(1000, 5.0)
    assert share.at(5.0) == 0.0
