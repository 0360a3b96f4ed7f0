"""From the moments at which tokens came to the figures that are reported. Pure: times are arguments, in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: when it was sent, and when each of its pieces came."""

    sent_s: float
    came_s: list[float]
    """Of each token, or of each event where a server sends several tokens in one."""
    num_tokens: int

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.came_s[0] - self.sent_s

    @property
    def total_s(self) -> float:
        """Time to the last token."""
        return self.came_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces that follow each other."""
        return [later - earlier for earlier, later in pairwise(self.came_s)]

    @property
    def per_token_s(self) -> float:
        """Mean time of each token after the first."""
        return (self.came_s[-1] - self.came_s[0]) / max(1, self.num_tokens - 1)


class Targets(NamedTuple):
    """What a request must keep to count as good; None: anything."""

    first_s: float | None = None
    per_token_s: float | None = None
    total_s: float | None = None

    def kept_by(self, timing: Timing) -> bool:
        """Whether a request kept all of them."""
        pairs = ((self.first_s, timing.first_s), (self.per_token_s, timing.per_token_s), (self.total_s, timing.total_s))
        return all(target is None or value <= target for target, value in pairs)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest ranks. `values` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies(timings: Sequence[Timing]) -> dict[str, float]:
    """Percentiles in milliseconds of time to first token, gap between tokens, and time to the last token."""
    series = {
        "ttft_ms": [timing.first_s for timing in timings],
        "itl_ms": [gap for timing in timings for gap in timing.gaps_s],
        "e2e_ms": [timing.total_s for timing in timings],
    }
    return {
        f"{name}_p{percent}": 1000 * percentile(values, percent)
        for name, values in series.items()
        if values
        for percent in PERCENTILES
    }


class Spread(NamedTuple):
    """A figure over several runs."""

    median: float
    low: float
    high: float


def over_runs(runs: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    """Each figure's median and extremes over the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            values.setdefault(name, []).append(value)
    return {name: Spread(statistics.median(found), min(found), max(found)) for name, found in values.items()}
