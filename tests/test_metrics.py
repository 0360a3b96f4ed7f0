"""Counters and histograms."""

from __future__ import annotations

import pytest

from weft.metrics import TOKEN_COUNT_BUCKETS, Counters, FrontMetrics, Histogram


def test_histogram_counts_up_to_and_including_a_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(1.5, 10)
    assert histogram.counts == [2, 12, 1]
    assert (histogram.count, histogram.total) == (15, 23.0)


def test_bounds_must_increase() -> None:
    for bounds in ((2.0, 1.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="increase"):
            Histogram(bounds)
    assert list(TOKEN_COUNT_BUCKETS) == sorted(TOKEN_COUNT_BUCKETS)


def test_counters_are_apart_by_label() -> None:
    counters = Counters()
    counters.add("a")
    counters.add("b", amount=2)
    counters.add("a")
    assert (counters.get("a"), counters.get("b"), counters.get("c")) == (2, 2, 0)


def test_a_model_keeps_its_metrics() -> None:
    metrics = FrontMetrics()
    assert metrics.model("m") is metrics.model("m")
    assert metrics.model("m") is not metrics.model("n")
